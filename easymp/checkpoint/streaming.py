"""From files straight into live tensors: only the bytes of the boxes that are here, and little memory beside.

Where a box's memory is plain and of the file's type, bytes are read into it. Elsewhere (another type, another device, rows with
gaps) they pass through a staging buffer, some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .boxes import Box, overlap, strides
from .buffers import aligned, as_bytes
from .manifest import BLOCK
from .slabs import STAGE, Slab, Want, slabs_of
from .storage import Tick, nothing
from .tensor_files import SourceFile


def stream(files: Mapping[str, SourceFile], wants: Iterable[Want], tick: Tick = nothing) -> None:
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
