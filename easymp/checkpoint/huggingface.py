"""Weights as Hugging Face's tools read them: ``model.safetensors``, or shards beside ``model.safetensors.index.json``.

A model that is there already is replaced at once. One file takes the place of another by a rename. Shards get names that no file has,
and count when the index that names them is in place; what they replace is removed after that. Where a folder holds both a single file
and an index, the single file counts, for us as for transformers and Accelerate; so whatever the moment of a crash, one whole model is
there, the old one or the new one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError, RefusedError
from .blocks import Part, Tick, as_bytes, no_tick
from .codec import dumps, loads, pack, unpack
from .folders import file_in, found_at, inside, read_header
from .header import encode, nbytes
from .layout import Shape, on_host, whole
from .manifest import COMMIT, INDEX, MANIFEST, Piece, Stored
from .read_plan import Want, stream
from .source import SINGLE, memory
from .storage import Storage

SHARD = re.compile(r"model(-\d+)?-\d{5}-of-\d{5}\.safetensors")
TEMPORARY = re.compile(r"\.model.*\.safetensors\.tmp")
GROUP = "model/"  # what the first model's tensors are called in a checkpoint

Bring = Callable[[str], Tensor | None]


def write_model(
    storage: Storage,
    folder: str,
    shards: Sequence[Sequence[Item]],
    bring: Bring,
    aliases: Mapping[str, str] | None = None,
    tick: Tick = no_tick,
) -> None:
    """Write `shards` into `folder` of `storage`, which is made where it is missing, in the place of a model that is there.

    Args:
        bring: gives the whole tensor of a name, on the CPU; called for each one in order.
        aliases: other names of tensors → the one that is written; noted in the metadata, as the safetensors library does.

    Raises:
        CheckpointError: the folder is a checkpoint.
        OSError: it cannot be written; a model that was there is untouched.
    """
    there = set(storage.list(folder))
    if there & {MANIFEST, COMMIT}:
        raise CheckpointError(
            f"{inside(storage.place, folder)} is a checkpoint of save_state, whose files must stay what they are: pass another folder"
        )
    if not there and storage.size(folder) is not None:
        raise CheckpointError(f"{inside(storage.place, folder)} is a file: pass a folder")
    if not there:
        try:
            storage.make(folder)
        except FileExistsError:
            pass  # an empty one
    for name in there:
        if TEMPORARY.fullmatch(name):  # of a save that did not end
            storage.remove(inside(folder, name))
    alone = len(shards) == 1 and (storage.renames or SINGLE not in there)
    names = [SINGLE] if alone else _free(len(shards), there)
    for name, shard in zip(names, shards):
        _write(
            storage,
            inside(folder, f".{name}.tmp" if storage.renames else name),
            shard,
            bring,
            aliases or {},
            tick,
        )
    if storage.renames:
        storage.sync(folder)
        for name in names:
            storage.supplant(inside(folder, f".{name}.tmp"), inside(folder, name))
        storage.sync(folder)
    if not alone:
        files = {item.name: name for name, shard in zip(names, shards) for item in shard}
        storage.replace(
            inside(folder, INDEX), _index(files, sum(item.bytes for shard in shards for item in shard))
        )
    outdated = [name for name in there if SHARD.fullmatch(name) and name not in names]
    for name in [*({INDEX} if alone else {SINGLE}) & there, *outdated]:
        storage.remove(inside(folder, name))
    storage.sync(folder)


def _free(size: int, taken: set[str]) -> list[str]:
    """The usual names of shards, or with a number where there are files of these names."""
    for number in count(1):
        stem = "model" if number == 1 else f"model-{number}"
        names = [f"{stem}-{i:05d}-of-{size:05d}.safetensors" for i in range(1, size + 1)]
        if not taken & set(names):
            return names
    raise AssertionError("numbers do not end")


def _write(
    storage: Storage, path: str, shard: Sequence[Item], bring: Bring, aliases: Mapping[str, str], tick: Tick
) -> None:
    mine = {item.name for item in shard}
    noted = {other: name for other, name in aliases.items() if name in mine}
    header, slots = encode(shard, {"format": "pt", **noted})

    def parts() -> Iterator[Part]:
        yield header
        for item in shard:
            yield content(item.name)  # held by nobody else, so that it goes when it is written

    def content(name: str) -> Part:
        tensor = bring(name)
        assert tensor is not None, "this is rank 0"
        return as_bytes(tensor)

    storage.put(path, parts(), slots[-1].end if slots else len(header), tick)


def index_of(tensors: Mapping[str, Stored]) -> bytes | None:
    """What makes a checkpoint's folder one of weights, too: where all those of its first model are whole in their files."""
    weights = {name.removeprefix(GROUP): stored for name, stored in tensors.items() if name.startswith(GROUP)}
    if not weights or any([piece.box for piece in s.pieces] != [whole(s.shape)] for s in weights.values()):
        return None
    return _index(
        {name: s.pieces[0].file for name, s in weights.items()}, sum(s.bytes for s in weights.values())
    )


def _index(files: Mapping[str, str], total: int) -> bytes:
    """Which file each tensor is in, and the bytes of all of them."""
    return (
        json.dumps({"metadata": {"total_size": total}, "weight_map": files}, indent=2, sort_keys=True) + "\n"
    ).encode()


# -- Which tensors go into which file, where a model is written in several: as huggingface_hub divides them.


class Item(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: Shape

    @property
    def bytes(self) -> int:
        return nbytes(self.dtype, self.shape) or 0


def cut(items: Sequence[Item], most: int) -> list[list[Item]]:
    """`items` in shards of at most `most` bytes, in their order; one that is larger gets a shard of its own.

    Its `split_torch_state_dict_into_shards` gives the same shards.
    """
    shards: list[list[Item]] = []
    current: list[Item] = []
    held = 0
    for item in items:
        if item.bytes > most:
            shards.append([item])
            continue
        if held + item.bytes > most:
            shards.append(current)
            current, held = [], 0
        current.append(item)
        held += item.bytes
    if current or not shards:
        shards.append(current)
    # Larger elements first, so that each tensor begins at a multiple of its element.
    return [sorted(shard, key=lambda item: -item.dtype.itemsize) for shard in shards]


def order(shards: Sequence[Sequence[Item]]) -> list[str]:
    """Names in the order in which `write_model` asks for them."""
    return [item.name for shard in shards for item in shard]


# -- One object in one file, without code: tensors as safetensors, and around them whatever `trees` can say.


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
