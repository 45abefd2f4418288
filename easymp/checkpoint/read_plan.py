"""The plan of reads: which bytes of each file go into which tensors, with little extra memory.

Bytes are read straight into a target whose memory is plain and of the file's type. For other targets (another type, another device, rows
with gaps) they pass through a staging buffer, some rows at a time. Columns are thousands of short runs in a file: one call reads them
together with the bytes between them, which verification needs anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError
from .folders import Opened, inside, read_header
from .header import PARTS, Slot, filed
from .layout import Box, Shape, overlap, runs, slices, span, strides
from .manifest import BLOCK, Manifest, Piece, Stored
from .snapshot import key
from .storage import SourceFile, Tick, aligned, as_bytes, is_plain, no_tick

STAGE = 2**25  # bytes that are read before they are converted
SHORT = 2**16  # bytes of a run that is not read by itself
NEAR = 2**20  # bytes from such a run to the next one, at most
ALIGNMENT = 64  # bytes; every dtype's size divides it
AT_ONCE = 2**30  # bytes of tensors that `one_by_one` reads at once, however many files there are


class Want(NamedTuple):
    """A request: read the elements of `box` of a stored tensor into `into`, a view of that shape."""

    stored: Stored
    box: Box
    into: Tensor


class Slab(NamedTuple):
    """A part of one piece that one call reads.

    Attributes:
        begin, end: its bytes in the file, from the first to the one after the last.
        runs: first byte and count of each run that is read, in order.
        into: a view that takes the elements.
        dtype: of the file.
        memory: shape of the row-major memory that the runs fill: a staging buffer, or if None that of `into` itself.
    """

    file: str
    begin: int
    end: int
    runs: Sequence[tuple[int, int]]
    into: Tensor
    dtype: torch.dtype
    memory: Shape | None


def plan(wants: Sequence[Want]) -> list[Slab]:
    """Divide `wants` into slabs."""
    slabs: list[Slab] = []
    for (stored, box, into), plain in zip(wants, [is_plain(want.into) for want in wants]):
        direct = plain and into.dtype == stored.dtype
        for piece in stored.pieces:
            if direct and piece.box == box and into.numel():
                end = piece.begin + into.nbytes
                runs_ = ((piece.begin, into.nbytes),)
                slabs.append(Slab(piece.file, piece.begin, end, runs_, into, stored.dtype, None))
            elif common := overlap(piece.box, box):
                slabs += _parts(stored.dtype, piece, common, _within(into, box, common))
    return slabs


def _parts(dtype: torch.dtype, piece: Piece, common: Box, into: Tensor) -> Iterator[Slab]:
    """Divide the elements `common` of `piece` into slabs, in the order of the file."""
    size = dtype.itemsize
    (first, run), (second, _) = [*islice(runs(common, piece.box), 2), (0, 0)][:2]
    closed = second > first and run * size < SHORT and (second - first) * size <= NEAR
    direct = not closed and into.dtype == dtype and is_plain(into)
    most = STAGE // size * common.count // (span(common, piece.box) if closed else common.count)
    for box in [common] if direct else slices(common, max(most, 1)):
        begin = piece.begin + next(runs(box, piece.box))[0] * size
        end = begin + span(box, piece.box) * size
        read, memory = [(begin, end - begin)], piece.box.shape
        if not closed:
            read = [(piece.begin + at * size, count * size) for at, count in runs(box, piece.box)]
            memory = box.shape
        into_ = _within(into, common, box)
        yield Slab(piece.file, begin, end, read, into_, dtype, None if direct else memory)


def _within(memory: Tensor, box: Box, part: Box) -> Tensor:
    """A view of the elements of `part` in `memory`, which holds the elements of `box`."""
    for d, (base, first, count) in enumerate(zip(box.offset, part.offset, part.shape)):
        memory = memory.narrow(d, first - base, count)
    return memory


def stream(files: Mapping[str, SourceFile], slabs: Iterable[Slab], tick: Tick = no_tick) -> None:
    """Read all `slabs`, file by file, in the order of their bytes."""
    by_file: dict[str, list[tuple[Slab, int, int]]] = {}  # with its bytes, and those in the staging buffer
    total = most = 0
    for slab in slabs:
        count = sum(n for _, n in slab.runs)
        staged = 0 if slab.memory is None else -(-count // ALIGNMENT) * ALIGNMENT
        total, most = total + staged, max(most, staged)
        by_file.setdefault(slab.file, []).append((slab, count, staged))
    stage = aligned(max(min(total, STAGE), most))
    with torch.no_grad():
        for name, found in by_file.items():
            found.sort(key=_first_byte)
            for batch in _batches(found, stage.numel()):
                _read(files[name], batch, stage, tick)


def _first_byte(item: tuple[Slab, int, int]) -> int:
    return item[0].begin


def blocks_of(slabs: Iterable[Slab]) -> dict[str, set[int]]:
    """The numbers of the blocks that `stream` would read, by file."""
    found: dict[str, set[int]] = {}
    for slab in slabs:
        numbers = found.setdefault(slab.file, set())
        for begin, count in slab.runs:
            numbers.update(range(begin // BLOCK, -(-(begin + count) // BLOCK)))
    return found


def _batches(slabs: list[tuple[Slab, int, int]], room: int) -> Iterator[list[tuple[Slab, int, int]]]:
    """Group slabs in order: without overlaps, each group within the size of the staging buffer. Overlapping slabs come last."""
    while slabs:
        batch, later = [], []
        held = end = 0
        for item in slabs:
            if item[0].begin < end:
                later.append(item)
                continue
            if held + item[2] > room:
                yield batch
                batch, held = [], 0
            batch.append(item)
            held += item[2]
            end = item[0].end
        yield batch
        slabs = later


def _read(file: SourceFile, batch: Sequence[tuple[Slab, int, int]], stage: Tensor, tick: Tick) -> None:
    buffers: list[Tensor] = []
    used = 0
    for slab, count, staged in batch:
        buffers.append(slab.into if slab.memory is None else stage[used : used + count].view(slab.dtype))
        used += staged
    wanted: list[tuple[int, memoryview]] = []
    for (slab, _, _), memory in zip(batch, [as_bytes(buffer) for buffer in buffers]):
        at = 0
        for begin, count in slab.runs:
            wanted.append((begin, memory[at : at + count]))
            at += count
    wanted.sort(key=lambda item: item[0])
    file.fetch(wanted, tick)
    for (slab, _, _), buffer in zip(batch, buffers):
        if slab.memory is not None:
            slab.into.copy_(buffer.as_strided(slab.into.shape, strides(slab.memory)))


# -- new tensors, one after the other ---------------------------------------------------------------------------------


def room(files: int) -> int:
    """Bytes to read at once from a checkpoint with tensors in that many files: one block of each, and at least a few."""
    return min(max(files, 4) * BLOCK, AT_ONCE)


def one_by_one(
    files: Mapping[str, SourceFile], wanted: Iterable[tuple[Stored, Box]], together: int, tick: Tick = no_tick
) -> Iterator[Tensor]:
    """Yield a new tensor for each box, in the order of `wanted`. One call reads up to `together` bytes, and at least one tensor.

    Files are read and verified in blocks, so reading neighbours together saves reading a block once per tensor. Raises as `stream`.
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
    stream(files, plan(batch))
    tick(
        sum(want.into.nbytes for want in batch)
    )  # not the bytes read for it: blocks at the edges are read twice
    while batch:
        yield batch.pop(0).into  # the caller may free it before the next


# -- headers against the manifest -------------------------------------------------------------------------------------


def preflight(opened: Opened, files: Collection[str]) -> None:
    """Check size and header of each of `files` against the manifest. Only headers are read."""
    held, there = expected(opened.manifest, files), opened.files
    for name in files:
        for why, _ in faults(there[name], held[name]):
            raise CheckpointError(f"{inside(opened.place, name)}: {why}: load another checkpoint")


def expected(manifest: Manifest, files: Collection[str]) -> dict[str, dict[str, tuple[str, Slot]]]:
    """The header of each of `files` as the manifest describes it: name in the file → full name and slot."""
    held: dict[str, dict[str, tuple[str, Slot]]] = {name: {} for name in files}
    for name, stored in manifest.tensors.items():
        for box, file, begin in stored.pieces:
            if file in held:
                end = begin + prod(box.shape) * stored.dtype.itemsize
                dtype, shape = stored.dtype, box.shape
                kind = filed(dtype, shape) if dtype in PARTS else (dtype, shape)
                held[file][key(name, box, stored.shape)] = (name, Slot(*kind, begin, end))
    return held


def faults(file: SourceFile, held: Mapping[str, tuple[str, Slot]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Differences between a file's header and `held`, in words, each with the tensors that it concerns."""
    concerned = tuple(tensor for tensor, _ in held.values())
    found = file.storage.size(file.name)
    if found is None:
        yield "is missing, or not a regular file", concerned
    elif found != file.size:
        yield f"has {found} bytes, and {file.size} were written", concerned
    elif held or file.name.endswith(".safetensors"):
        try:
            slots, _ = read_header(file)
        except CheckpointError as error:
            yield str(error).removeprefix(f"{file}: "), concerned
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
