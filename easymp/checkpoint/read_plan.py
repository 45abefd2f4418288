"""What is read of which file, and where it goes: the bytes of chunks straight into tensors, with little memory beside.

Where a target's memory is plain and of the file's type, bytes are read into it. Elsewhere (another type, another device, rows with gaps)
they pass through a staging buffer, some rows at a time. Columns lie in a file as thousands of short runs: they are read with what lies
between, as one call. A storage that verifies reads those bytes anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import prod

import torch
from torch import Tensor

from ..errors import CheckpointError
from .blocks import Tick, aligned, as_bytes, no_tick
from .folders import SourceFile, inside
from .header import PARTS, Slot, decode, filed, length
from .layout import Box, overlap, runs, slices, span, strides
from .manifest import BLOCK, Manifest, Piece, Stored
from .snapshot import key
from .storage import Storage

STAGE = 2**25  # bytes that are read before they are converted
SHORT = 2**16  # bytes of a run that is not read by itself
NEAR = 2**20  # bytes from such a run to the next one, at most
ALIGNMENT = 64  # bytes; every dtype's size divides it
AT_ONCE = 2**30  # bytes of tensors that `one_by_one` reads at once, however many files there are
FIRST = 2**16  # bytes of a file that `faults` reads at once: its header, mostly


@dataclass(frozen=True, eq=False)
class Want:
    """The elements of `box` of a stored tensor go to `into`, a view of that shape with memory here."""

    stored: Stored
    box: Box
    into: Tensor

    @cached_property
    def slabs(self) -> list[Slab]:
        """The parts in which it is read."""
        return list(slabs_of(self))


@dataclass(frozen=True, eq=False)
class Slab:
    """A part of one piece that is read at once.

    Attributes:
        begin, end: its bytes in the file, from the first to the one after the last.
        direct: read into the memory of `into` itself.
        closed: read from its first to its last byte, with what lies between.
    """

    begin: int
    end: int
    piece: Piece
    dtype: torch.dtype
    box: Box
    into: Tensor
    direct: bool
    closed: bool

    @property
    def count(self) -> int:
        """Bytes that are read."""
        return self.end - self.begin if self.closed else prod(self.box.shape) * self.dtype.itemsize

    @property
    def staged(self) -> int:
        """Bytes that it takes of the staging buffer."""
        return 0 if self.direct else -(-self.count // ALIGNMENT) * ALIGNMENT

    def places(self) -> Iterator[tuple[int, int]]:
        """First byte in the file and count of each run that is read, in order."""
        if self.closed or self.box == self.piece.box:
            yield self.begin, self.end - self.begin
            return
        size = self.dtype.itemsize
        for first, count in runs(self.box, self.piece.box):
            yield self.piece.begin + first * size, count * size


def slabs_of(want: Want) -> Iterator[Slab]:
    """The parts of `want`, in the order in which they lie in each file."""
    stored, size = want.stored, want.stored.dtype.itemsize
    for piece in stored.pieces:
        into, same = want.into, piece.box == want.box and stored.dtype == want.into.dtype
        if same and prod(piece.box.shape) and _is_plain(into):
            end = piece.begin + prod(piece.box.shape) * size
            yield Slab(piece.begin, end, piece, stored.dtype, piece.box, into, direct=True, closed=False)
            continue
        common = overlap(piece.box, want.box)
        if common is None:
            continue
        into = _within(want.into, want.box, common)
        (first, run), (second, _) = [*islice(runs(common, piece.box), 2), (0, 0)][:2]
        closed = second > first and run * size < SHORT and (second - first) * size <= NEAR
        direct = _is_plain(into) and into.dtype == stored.dtype and not closed
        most = STAGE // size * common.count // (span(common, piece.box) if closed else common.count)
        for box in [common] if direct else slices(common, max(most, 1)):
            begin = piece.begin + next(runs(box, piece.box))[0] * size
            end = begin + span(box, piece.box) * size
            yield Slab(begin, end, piece, stored.dtype, box, _within(into, common, box), direct, closed)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _within(memory: Tensor, box: Box, part: Box) -> Tensor:
    """Where the elements of `part` are in `memory`, which holds those of `box`."""
    for d, (base, first, count) in enumerate(zip(box.offset, part.offset, part.shape)):
        memory = memory.narrow(d, first - base, count)
    return memory


def stream(files: Mapping[str, SourceFile], wants: Iterable[Want], tick: Tick = no_tick) -> None:
    """Read all `wants`, file by file, in the order in which the bytes lie there.

    Raises:
        CheckpointError: bytes that are missing or not what was written; some of `wants` may be read by then.
        OSError: a file cannot be read.
    """
    by_file: dict[str, list[Slab]] = {}
    for want in wants:
        for slab in want.slabs:
            by_file.setdefault(slab.piece.file, []).append(slab)
    staged = [slab.staged for slabs in by_file.values() for slab in slabs]
    stage = aligned(max(min(sum(staged), STAGE), max(staged, default=0)))
    with torch.no_grad():
        for name, slabs in by_file.items():
            slabs.sort(key=lambda slab: slab.begin)
            for batch in _batches(slabs, stage.numel()):
                _read(files[name], batch, stage, tick)


def blocks_of(wants: Iterable[Want]) -> dict[str, set[int]]:
    """For each file, the numbers of the blocks that `stream` would read."""
    found: dict[str, set[int]] = {}
    for want in wants:
        for slab in want.slabs:
            numbers = found.setdefault(slab.piece.file, set())
            for begin, count in slab.places():
                numbers.update(range(begin // BLOCK, -(-(begin + count) // BLOCK)))
    return found


def _batches(slabs: Sequence[Slab], room: int) -> Iterator[list[Slab]]:
    """In their order, without overlaps, each within the room of the staging buffer. What overlaps comes after all others."""
    while slabs:
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
        yield batch
        slabs = later


def _read(file: SourceFile, batch: Sequence[Slab], stage: Tensor, tick: Tick) -> None:
    buffers: list[Tensor] = []
    used = 0
    for slab in batch:
        buffers.append(slab.into if slab.direct else stage[used : used + slab.count].view(slab.dtype))
        used += slab.staged
    wanted: list[tuple[int, memoryview]] = []
    for slab, memory in zip(batch, [as_bytes(buffer) for buffer in buffers]):
        at = 0
        for begin, count in slab.places():
            wanted.append((begin, memory[at : at + count]))
            at += count
    wanted.sort(key=lambda item: item[0])
    file.storage.fetch(file.name, file.size, file.checksums, wanted, tick)
    for slab, buffer in zip(batch, buffers):
        if not slab.direct:
            steps = strides((slab.piece.box if slab.closed else slab.box).shape)
            slab.into.copy_(buffer.as_strided(slab.box.shape, steps))


# -- new tensors, one after the other ---------------------------------------------------------------------------------


def room(files: int) -> int:
    """Bytes to read at once of a checkpoint whose tensors lie in so many files: a block of each one, and a few at least."""
    return min(max(files, 4) * BLOCK, AT_ONCE)


def one_by_one(
    files: Mapping[str, SourceFile], wanted: Iterable[tuple[Stored, Box]], together: int, tick: Tick = no_tick
) -> Iterator[Tensor]:
    """A new tensor of each box, in the order of `wanted`; as many are read at once as have `together` bytes, or one.

    Files are read and verified in blocks, so reading neighbours together saves reading a block once per tensor.

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
        yield batch.pop(0).into  # the caller may free it before the next


# -- headers against the manifest -------------------------------------------------------------------------------------


def preflight(storage: Storage, folder: str, manifest: Manifest, files: Collection[str]) -> None:
    """Check that each of `files` has the size and the tensors that `manifest` says. Reads headers alone.

    Raises:
        CheckpointError: one has not; which, and which tensor.
        OSError: it cannot be read.
    """
    held = expected(manifest, files)
    for name in files:
        for why, _ in faults(storage, folder, name, manifest.files[name].size, held[name]):
            place = inside(inside(storage.place, folder), name)
            raise CheckpointError(f"{place}: {why}: load another checkpoint")


def expected(manifest: Manifest, files: Collection[str]) -> dict[str, dict[str, tuple[str, Slot]]]:
    """For each of `files`, its header by the manifest: by the name there, the full name of the tensor, and its slot."""
    held: dict[str, dict[str, tuple[str, Slot]]] = {name: {} for name in files}
    for name, stored in manifest.tensors.items():
        for box, file, begin in stored.pieces:
            if file in held:
                kind = filed(stored.dtype, box.shape) if stored.dtype in PARTS else (stored.dtype, box.shape)
                slot = Slot(*kind, begin, begin + prod(box.shape) * stored.dtype.itemsize)
                held[file][key(name, box, stored.shape)] = (name, slot)
    return held


def faults(
    storage: Storage, folder: str, name: str, size: int, held: Mapping[str, tuple[str, Slot]]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Faults of a file in words, and the tensors that each concerns. It should have `size` bytes, and a header that says `held`."""
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
        tensor, slot = held.get(word, ("", None))
        if slots.get(word) != slot:
            there, here = _said(slots.get(word)), _said(slot)
            words = f"its header says other than the manifest of {word!r:.300}: {there}, not {here}"
            yield words, (tensor,) if tensor else ()


def _said(slot: Slot | None) -> str:
    if slot is None:
        return "nothing"
    return f"{slot.dtype} {list(slot.shape)} in bytes {slot.begin} to {slot.end}"
