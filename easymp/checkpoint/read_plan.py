"""The parts in which a box of a stored tensor is read, and where each of them goes in memory.

Of columns, a file has short runs, thousands of them. They are read with what lies between, as one call, which storages read anyway
where they verify it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from ..errors import CheckpointError
from .blocks import Tick, aligned, as_bytes, no_tick
from .folders import SourceFile, inside
from .header import Slot, decode, filed, length
from .layout import Box, overlap, runs, slices, span, strides
from .manifest import BLOCK, Manifest, Piece, Stored
from .snapshot import key
from .storage import Storage

STAGE = 2**25  # bytes read before they are converted
SHORT = 2**16  # bytes of a run that is not read by itself
NEAR = 2**20  # bytes from such a run to the next one, at most
ALIGNMENT = 64  # bytes; every dtype's size divides it


@dataclass(frozen=True, eq=False)
class Want:
    """The elements of `box` of a stored tensor shall be in `into`, a view of that shape with memory here."""

    stored: Stored
    box: Box
    into: Tensor


@dataclass(frozen=True, eq=False)
class Slab:
    """A part of one piece that is read at once, and where it goes."""

    begin: int  # its first byte in the file
    piece: Piece
    dtype: torch.dtype
    box: Box
    into: Tensor
    direct: bool  # read into the memory of `into` itself
    closed: bool  # read from its first to its last byte, with what lies between

    @property
    def end(self) -> int:
        """The byte after its last one."""
        return self.begin + span(self.box, self.piece.box) * self.dtype.itemsize

    @property
    def count(self) -> int:
        """Bytes that are read."""
        return self.end - self.begin if self.closed else self.box.count * self.dtype.itemsize

    def places(self) -> Iterator[tuple[int, int]]:
        """What is read of the file: first byte and count of each run, in order."""
        if self.closed:
            yield self.begin, self.count
            return
        size = self.dtype.itemsize
        for first, count in runs(self.box, self.piece.box):
            yield self.piece.begin + first * size, count * size

    @property
    def staged(self) -> int:
        """Bytes that it takes of the staging buffer."""
        return 0 if self.direct else -(-self.count // ALIGNMENT) * ALIGNMENT


def slabs_of(want: Want) -> Iterator[Slab]:
    """The parts of `want`, in the order in which they lie in each file."""
    stored, size = want.stored, want.stored.dtype.itemsize
    for piece in stored.pieces:
        common = overlap(piece.box, want.box)
        if common is None:
            continue
        into = _within(want.into, want.box, common)
        plain = into.is_cpu and into.is_contiguous() and not into.is_conj() and not into.is_neg()
        closed = _in_short_runs(common, piece.box, size)
        direct = plain and into.dtype == stored.dtype and not closed
        most = STAGE // size * common.count // (span(common, piece.box) if closed else common.count)
        for box in [common] if direct else slices(common, max(most, 1)):
            first, _ = next(runs(box, piece.box))
            yield Slab(
                piece.begin + first * size,
                piece,
                stored.dtype,
                box,
                _within(into, common, box),
                direct,
                closed,
            )


def _in_short_runs(part: Box, within: Box, size: int) -> bool:
    """Whether `part` lies there in several runs of few bytes that are near to each other."""
    there = islice(runs(part, within), 2)
    first, length = next(there)
    second, _ = next(there, (first, 0))
    return second > first and length * size < SHORT and (second - first) * size <= NEAR


def _within(memory: Tensor, box: Box, part: Box) -> Tensor:
    """Where the elements of `part` are in `memory`, which holds those of `box`."""
    for d, (base, first, count) in enumerate(zip(box.offset, part.offset, part.shape)):
        memory = memory.narrow(d, first - base, count)
    return memory


# -- From files straight into live tensors: only the bytes of the boxes that are here, and little memory beside.


def stream(files: Mapping[str, SourceFile], wants: Iterable[Want], tick: Tick = no_tick) -> None:
    """Read all `wants`, file by file, in the order in which the bytes lie there.

    Raises:
        CheckpointError: bytes that are missing or not what was written; some of `wants` may be read by then.
        OSError: a file cannot be read.
    """
    now, later = _rounds(wants)
    by_file: dict[str, list[Slab]] = {}
    for want in now:
        for slab in slabs_of(want):
            by_file.setdefault(slab.piece.file, []).append(slab)
    needed = sum(slab.staged for slabs in by_file.values() for slab in slabs)
    largest = max((slab.staged for slabs in by_file.values() for slab in slabs), default=0)
    stage = aligned(max(min(needed, STAGE), largest))
    with torch.no_grad():
        for name, slabs in by_file.items():
            slabs.sort(key=lambda slab: slab.begin)
            for batch in _batches(slabs, stage.numel()):
                _read(files[name], batch, stage, tick)
    if later:
        stream(files, later, tick)


def blocks_of(wants: Iterable[Want]) -> dict[str, set[int]]:
    """For each file, the numbers of the blocks that `stream` would read."""
    found: dict[str, set[int]] = {}
    for want in wants:
        for slab in slabs_of(want):
            numbers = found.setdefault(slab.piece.file, set())
            for begin, count in slab.places():
                numbers.update(range(begin // BLOCK, -(-(begin + count) // BLOCK)))
    return found


def _rounds(wants: Iterable[Want]) -> tuple[list[Want], list[Want]]:
    """What can be read in one go, and what would read some bytes again: those wait for the next."""
    seen: dict[int, list[Box]] = {}
    now: list[Want] = []
    later: list[Want] = []
    for want in wants:
        boxes = seen.setdefault(id(want.stored), [])
        if any(overlap(box, want.box) for box in boxes):
            later.append(want)
        else:
            boxes.append(want.box)
            now.append(want)
    return now, later


def _batches(slabs: Sequence[Slab], room: int) -> Iterator[list[Slab]]:
    """In their order, without overlaps, each within the room of the staging buffer. What overlaps comes after all others."""
    batch: list[Slab] = []
    later: list[Slab] = []
    held = end = 0
    for slab in slabs:
        if slab.begin < end:
            later.append(slab)
            continue
        if held + slab.staged > room:
            yield batch
            batch, held = [], 0
        batch.append(slab)
        held += slab.staged
        end = slab.end
    if batch:
        yield batch
    if later:
        yield from _batches(later, room)


def _read(file: SourceFile, batch: Sequence[Slab], stage: Tensor, tick: Tick) -> None:
    wanted: list[tuple[int, memoryview]] = []
    converted: list[tuple[Tensor, Tensor]] = []
    used = 0
    for slab in batch:
        buffer = slab.into if slab.direct else stage[used : used + slab.count].view(slab.dtype)
        used += slab.staged
        memory, at = as_bytes(buffer), 0
        for begin, count in slab.places():
            wanted.append((begin, memory[at : at + count]))
            at += count
        if not slab.direct:
            steps = strides((slab.piece.box if slab.closed else slab.box).shape)
            converted.append((slab.into, buffer.as_strided(slab.box.shape, steps)))
    wanted.sort(key=lambda item: item[0])
    file.storage.fetch(file.name, file.size, file.checksums, wanted, tick)
    for into, buffer in converted:
        into.copy_(buffer)


# -- The tensors of a checkpoint, one after the other, through little memory.


MOST = 2**30  # bytes read at once, however many files


def room(files: int) -> int:
    """Bytes to read at once of a checkpoint whose tensors lie in so many files: of each one a block, and a few at least."""
    return min(max(files, 4) * BLOCK, MOST)


def one_by_one(
    files: Mapping[str, SourceFile], wanted: Iterable[tuple[Stored, Box]], together: int, tick: Tick = no_tick
) -> Iterator[Tensor]:
    """A new tensor of each box, in the order of `wanted`; as many are read at once as have `together` bytes, or one.

    Raises:
        CheckpointError: bytes that are missing or not what was written.
        OSError: a file cannot be read.
    """
    batch: list[Want] = []
    held = 0
    for stored, box in wanted:
        size = box.count * stored.dtype.itemsize
        if batch and held + size > together:
            yield from _batch(files, batch, tick)
            batch, held = [], 0
        batch.append(Want(stored, box, torch.empty(box.shape, dtype=stored.dtype)))
        held += size
    yield from _batch(files, batch, tick)


def _batch(files: Mapping[str, SourceFile], batch: list[Want], tick: Tick) -> Iterator[Tensor]:
    stream(files, batch)
    tick(
        sum(want.into.nbytes for want in batch)
    )  # not what was read for it: blocks at the edges are read twice
    while batch:
        yield batch.pop(0).into  # who takes it may let it go before the next


# -- Before a byte is read: the files of a checkpoint are those that the manifest describes, and so are their headers.


FIRST = 2**16  # bytes that are read at once: a header, mostly, and elsewhere its length


def preflight(storage: Storage, folder: str, manifest: Manifest, files: Collection[str]) -> None:
    """Each of `files` is a regular file right in `folder`, of the size and with the tensors that `manifest` says. Reads headers alone.

    Raises:
        CheckpointError: one is not; which, and which tensor.
        OSError: it cannot be read.
    """
    held = expected(manifest, files)
    for name in files:
        for why, _ in faults(storage, folder, name, manifest.files[name].size, held[name]):
            raise CheckpointError(
                f"{inside(inside(storage.place, folder), name)}: {why}: load another checkpoint"
            )


def expected(manifest: Manifest, files: Collection[str]) -> dict[str, dict[str, tuple[str, Slot]]]:
    """For each of `files`, what its header has by the manifest: by the name there, the full name of the tensor, and its slot."""
    held: dict[str, dict[str, tuple[str, Slot]]] = {name: {} for name in files}
    for name, stored in manifest.tensors.items():
        for box, file, begin in stored.pieces:
            if file in held:
                slot = Slot(*filed(stored.dtype, box.shape), begin, begin + box.count * stored.dtype.itemsize)
                held[file][key(name, box, stored.shape)] = (name, slot)
    return held


def faults(
    storage: Storage, folder: str, name: str, size: int, held: dict[str, tuple[str, Slot]]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What is wrong with a file, in words, and the tensors that it concerns. It should have `size` bytes, and a header that says `held`."""
    path = inside(folder, name)
    concerned = tuple(tensor for tensor, _ in held.values())
    found = storage.size(path)
    if found is None:
        yield "is missing, or no regular file", concerned
        return
    if found != size:
        yield f"has {found} bytes, and {size} were written", concerned
        return
    if not held and not name.endswith(".safetensors"):
        return
    try:
        text = storage.head(path, FIRST)
        if (count := length(text, size, name)) > len(text):
            text = storage.head(path, count)
        slots = decode(text, size, name)
    except CheckpointError as error:
        yield str(error).removeprefix(f"{name}: "), concerned
        return
    for word in sorted(slots.keys() | held.keys()):
        tensor, slot = held.get(word, (None, None))
        if slots.get(word) != slot:
            there, here = _said(slots.get(word)), _said(slot)
            yield (
                f"its header says other than the manifest of {word!r:.300}: {there}, not {here}",
                (tensor,) if tensor else (),
            )


def _said(slot: Slot | None) -> str:
    return (
        "nothing" if slot is None else f"{slot.dtype} {list(slot.shape)} in bytes {slot.begin} to {slot.end}"
    )
