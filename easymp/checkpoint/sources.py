"""Where weights come from: one safetensors file, a Hugging Face folder, or a checkpoint of ours, all described in the same words."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import CheckpointError, nearest
from .boxes import whole
from .folders import current
from .manifest import COMMIT, MANIFEST, Piece, Stored
from .opening import open_checkpoint
from .storage import Storage
from .storages import open_storage
from .strict import loads
from .tensor_files import SourceFile, file_in, found_at, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LARGEST_INDEX = 2**28  # bytes


@dataclass(frozen=True)
class Source:
    """Weights, described and not read.

    Attributes:
        place: where, as the user said it.
        tensors: by name, as their writer spelled it.
        aliases: names of tensors that are other names of these.
        files: by the name that the pieces of `tensors` have for them.
    """

    place: str
    tensors: Mapping[str, Stored]
    aliases: Mapping[str, str]
    files: Mapping[str, SourceFile]

    def find(self, name: str) -> Stored | None:
        """The tensor of that name, its own or another one that it has."""
        return self.tensors.get(self.aliases.get(name, name))


def open_source(place: str | os.PathLike[str], which: str = "model") -> Source:
    """What there is at `place`: a ``.safetensors`` file, an ``.index.json``, or a folder with either of them or of ours.

    In a folder that holds both, the single file counts, as for Hugging Face's libraries.

    Args:
        which: whose weights, of a checkpoint of ours.

    Raises:
        CheckpointError: nothing of that kind is there, or it is damaged.
    """
    said = os.fspath(place)
    try:
        if said.endswith(".json"):
            return _indexed(said, *found_at(said))
        if said.endswith(".safetensors") or ("://" not in said and os.path.isfile(said)):
            return _single(said, *found_at(said))
        folder = open_storage(said)
        there = set(folder.list())
        if there & {MANIFEST, COMMIT} or (not there and _lies_beside(said)):
            return _committed(said, which)
        if SINGLE in there:
            return _single(said, folder, SINGLE)
        if INDEX in there:
            return _indexed(said, folder, INDEX)
    except OSError as error:
        raise CheckpointError(f"{said}: cannot be read ({error})") from error
    raise CheckpointError(f"{said}: {_what_else(there)}")


def _lies_beside(place: str) -> bool:
    """Whether it is a checkpoint whose newest save has a name of its own."""
    storage, name = found_at(place)
    return current(storage, name) != name


def _what_else(there: set[str]) -> str:
    steps = sorted(name for name in there if name.startswith("step-"))
    if steps:
        return f"a folder of checkpoints: pass that of one of them, such as {steps[-1]}"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in there):
        return (
            "no safetensors, but files of torch.save, which can run code when they are read: convert them with safetensors.torch; folders "
            "of Accelerate's save_state are read by easymp.checkpoint.read_accelerate"
        )
    single = [name for name in sorted(there) if name.endswith(".safetensors")]
    if single:
        return f"neither {SINGLE} nor {INDEX} is there: pass a file, such as {single[0]}"
    found = f"it holds {', '.join(sorted(there)[:5])}" if there else "it is empty or missing"
    return f"no weights: neither {SINGLE}, nor {INDEX}, nor a checkpoint ({MANIFEST}), {found}"


def _single(place: str, folder: Storage, name: str) -> Source:
    file = file_in(folder, name)
    tensors, aliases = _described(file, name)
    return Source(place, tensors, aliases, {name: file})


def _described(file: SourceFile, known_as: str) -> tuple[dict[str, Stored], dict[str, str]]:
    slots, metadata = read_header(file)
    tensors = {
        name: Stored(slot.dtype, slot.shape, (Piece(whole(slot.shape), known_as, slot.begin),))
        for name, slot in slots.items()
    }
    # What is written once for several names says so in the metadata: other name → the one that is there.
    return tensors, {
        name: of
        for name, of in metadata.items()
        if name != "format" and of in tensors and name not in tensors
    }


def _indexed(place: str, folder: Storage, name: str) -> Source:
    index = file_in(folder, name)
    where = f"{folder.place.rstrip('/')}/{name}"
    said = loads(index.storage.get(index.name, LARGEST_INDEX), where)
    table = said.get("weight_map") if isinstance(said, dict) else None
    if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
        raise CheckpointError(f"{where}: no index of weights: it has no weight_map from names to files")
    tensors: dict[str, Stored] = {}
    aliases: dict[str, str] = {}
    files: dict[str, SourceFile] = {}
    for shard in dict.fromkeys(table.values()):
        if "/" in shard or "\\" in shard or shard in ("", ".", ".."):
            raise CheckpointError(
                f"{where}: the weights shall be in {shard!r}, which is not a file beside the index"
            )
        files[shard] = file_in(folder, shard)
        inside, noted = _described(files[shard], shard)
        absent = [
            name for name, file in table.items() if file == shard and name not in inside and name not in noted
        ]
        if absent:
            raise CheckpointError(
                f"{where}: {absent[0]} shall be in {shard}, which has no such tensor: the folder is damaged"
            )
        tensors.update((name, stored) for name, stored in inside.items() if table.get(name) == shard)
        aliases.update(noted)
    return Source(
        place,
        tensors,
        {name: of for name, of in aliases.items() if of in tensors and name not in tensors},
        files,
    )


def _committed(place: str, which: str) -> Source:
    found = open_checkpoint(place)
    tensors, others = found.manifest.tensors, found.manifest.aliases
    known = dict.fromkeys(name.partition("/")[0] for name in tensors if name.startswith("model"))
    if which not in known:
        raise CheckpointError(
            f"{place} has no weights of {which!r}{nearest(which, known) or '.'} It has: {', '.join(known) or 'no model'}"
        )
    prefix = f"{which}/"
    mine = {name.removeprefix(prefix): stored for name, stored in tensors.items() if name.startswith(prefix)}
    aliases = {
        name.removeprefix(prefix): of.removeprefix(prefix)
        for name, of in others.items()
        if name.startswith(prefix)
    }
    used = {piece.file for stored in mine.values() for piece in stored.pieces}
    return Source(place, mine, aliases, {name: file for name, file in found.files.items() if name in used})
