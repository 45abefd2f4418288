"""Weights as Hugging Face's tools read them: ``model.safetensors``, or shards beside ``model.safetensors.index.json``.

A model that is there already is replaced at once. One file takes the place of another by a rename. Shards get names that no file has,
and count when the index that names them is in place; what they replace is removed after that. Where a folder holds both a single file
and an index, the single file counts, for us as for transformers and Accelerate; so whatever the moment of a crash, one whole model is
there, the old one or the new one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count

from torch import Tensor

from ..errors import CheckpointError
from .boxes import whole
from .buffers import as_bytes
from .committed import inside
from .header import encode
from .manifest import COMMIT, MANIFEST, Stored
from .sharding import Item
from .sources import INDEX, SINGLE
from .storage import Part, Storage, Tick, nothing

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
    tick: Tick = nothing,
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
