"""One object in one file, without code: tensors as safetensors, and around them whatever `trees` can say.

A mapping of names to tensors is a plain safetensors file, for everyone. Of anything else the structure goes into the file's metadata,
under "easymp"; what has no tensors may be JSON instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, RefusedError
from .boxes import whole
from .buffers import as_bytes
from .gathering import on_host
from .header import encode
from .manifest import Piece, Stored
from .matching import memory
from .slabs import Want
from .storage import Part
from .streaming import stream
from .strict import dumps, loads
from .tensor_files import file_in, found_at, read_header
from .trees import pack, unpack

TREE = "easymp"  # what the structure is called in the metadata
LARGEST = 2**28  # bytes of JSON
OTHERS = (".bin", ".pt", ".pth", ".pkl", ".ckpt")  # names that promise a file of torch.save


def save_tree(tree: Any, f: str | os.PathLike[str]) -> None:
    """Write `tree` to the file `f`, in the place of one that is there once it is on disk.

    Raises:
        CheckpointError: something in it cannot be stored, or the file cannot be written; one that was there is untouched.
        RefusedError: the name promises a file of torch.save.
    """
    place = os.fspath(f)
    if place.lower().endswith(OTHERS):
        raise RefusedError(
            f"{place}: files of that name are read by torch.load, which can run code from them, and safetensors are written: call it "
            f"{os.path.splitext(place)[0]}.safetensors"
        )
    tensors: dict[str, Tensor] = {}
    metadata = {"format": "pt"}
    plain = (
        isinstance(tree, Mapping)
        and bool(tree)
        and all(type(k) is str and isinstance(v, Tensor) for k, v in tree.items())
    )
    if plain:
        tensors, aliases = _once(tree)
        metadata.update(aliases)
    else:
        packed = dumps(pack(tree, "object", tensors))
        if place.endswith(".json"):
            if tensors:
                raise CheckpointError(
                    f"{place}: {next(iter(tensors))} is a tensor, which JSON has no form for: call it .safetensors"
                )
            _replace(place, [packed], len(packed))
            return
        metadata[TREE] = packed.decode()
    for name, tensor in tensors.items():
        if hasattr(tensor, "to_local"):
            raise CheckpointError(
                f"{name} is spread over the ranks: save what get_state_dict(model) returns, or its full_tensor()"
            )
    header, slots = encode([(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()], metadata)

    def parts() -> Iterator[Part]:
        yield header
        for name, tensor in tensors.items():
            if tensor.numel():
                yield as_bytes(on_host(tensor, name))

    _replace(place, parts(), slots[-1].end if slots else len(header))


def load(f: str | os.PathLike[str]) -> Any:
    """What `Accelerator.save` wrote to `f`, its tensors on the CPU; or the tensors by name of any safetensors file.

    Raises:
        CheckpointError: it is neither, or cannot be read.
    """
    place = os.fspath(f)
    try:
        file = file_in(*found_at(place))
        if place.endswith(".json"):
            return unpack(loads(file.storage.get(file.name, LARGEST), place), _no_tensor)
        slots, metadata = read_header(file)
        tensors = {name: torch.empty(slot.shape, dtype=slot.dtype) for name, slot in slots.items()}
        pieces = {name: (Piece(whole(slot.shape), "", slot.begin),) for name, slot in slots.items()}
        stream(
            {"": file},
            [
                Want(Stored(t.dtype, tuple(t.shape), pieces[name]), whole(t.shape), t)
                for name, t in tensors.items()
            ],
        )
    except OSError as error:
        raise CheckpointError(f"{place}: cannot be read ({error})") from error
    if TREE in metadata:
        return unpack(loads(metadata[TREE].encode(), place), tensors.__getitem__)
    aliases = {name: of for name, of in metadata.items() if name != "format" and of in tensors}
    return tensors | {name: tensors[of] for name, of in aliases.items()}


def _once(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor under its first name, and further names → that one."""
    seen: dict[Any, str] = {}
    for name, tensor in tensors.items():
        seen.setdefault(memory(tensor), name)
    first = {name: tensor for name, tensor in tensors.items() if seen[memory(tensor)] == name}
    return first, {name: seen[memory(tensor)] for name, tensor in tensors.items() if name not in first}


def _no_tensor(name: str) -> Any:
    raise CheckpointError(f"{name} is a tensor, and a file of JSON holds none: it was changed")


def _replace(place: str, parts: Any, size: int) -> None:
    storage, name = found_at(place)
    try:
        if not storage.renames:
            storage.replace(name, b"".join(parts))
            return
        fresh = f".{name}.tmp"
        storage.remove(fresh)
        storage.put(fresh, parts, size)
        storage.supplant(fresh, name)
        storage.sync()
    except OSError as error:
        raise CheckpointError(f"{place}: cannot be written ({error})") from error
