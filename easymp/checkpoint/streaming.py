"""From files straight into live tensors: only the bytes of the boxes that are here, and little memory beside.

Where a box's memory is plain and of the file's type, bytes are read into it. Elsewhere (another type, another device, rows with
gaps) they pass through a staging buffer, some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .boxes import Box, overlap, runs
from .buffers import aligned, as_bytes
from .manifest import Piece, Stored
from .sources import SourceFile
from .storage import Tick

STAGE = 2**25  # bytes read before they are converted
ALIGNMENT = 64  # bytes; every dtype's size divides it


@dataclass(frozen=True, eq=False)
class Want:
    """The elements of `box` of a stored tensor shall be in `into`, a view of that shape with memory here."""

    stored: Stored
    box: Box
    into: Tensor


@dataclass(frozen=True, eq=False)
class _Slab:
    """A part of one piece that is read at once, and where it goes."""

    begin: int  # its first byte in the file
    piece: Piece
    dtype: torch.dtype
    box: Box
    into: Tensor
    direct: bool  # read into the memory of `into` itself

    @property
    def staged(self) -> int:
        """Bytes that it takes of the staging buffer."""
        return 0 if self.direct else -(-self.box.count * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT


def stream(files: Mapping[str, SourceFile], wants: Iterable[Want], tick: Tick = lambda n: None) -> None:
    """Read all `wants`, file by file, in the order in which the bytes lie there.

    Raises:
        CheckpointError: bytes that are missing or not what was written; some of `wants` may be read by then.
        OSError: a file cannot be read.
    """
    now, later = _rounds(wants)
    by_file: dict[str, list[_Slab]] = {}
    for want in now:
        for slab in _slabs_of(want):
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


def _slabs_of(want: Want) -> Iterator[_Slab]:
    stored, size = want.stored, want.stored.dtype.itemsize
    for piece in stored.pieces:
        common = overlap(piece.box, want.box)
        if common is None:
            continue
        into = want.into
        for d, (o, n, base) in enumerate(zip(common.offset, common.shape, want.box.offset)):
            into = into.narrow(d, o - base, n)
        plain = into.is_cpu and into.is_contiguous() and not into.is_conj() and not into.is_neg()
        direct = plain and into.dtype == stored.dtype
        for box, view in [(common, into)] if direct else _rows(common, into, STAGE // size):
            first, _ = next(runs(box, piece.box))
            yield _Slab(piece.begin + first * size, piece, stored.dtype, box, view, direct)


def _rows(box: Box, view: Tensor, most: int) -> Iterator[tuple[Box, Tensor]]:
    """`box` in parts of at most `most` elements, in order, each with its part of `view`."""
    dim = next((d for d, n in enumerate(box.shape) if n > 1), None)
    if box.count <= most or dim is None:
        yield box, view
        return
    each = max(most // (box.count // box.shape[dim]), 1)
    for first in range(0, box.shape[dim], each):
        count = min(each, box.shape[dim] - first)
        part = Box(
            (*box.offset[:dim], box.offset[dim] + first, *box.offset[dim + 1 :]), (*box.shape[:dim], count, *box.shape[dim + 1 :])
        )
        yield from _rows(part, view.narrow(dim, first, count), most)


def _batches(slabs: Sequence[_Slab], room: int) -> Iterator[list[_Slab]]:
    batch: list[_Slab] = []
    held = 0
    for slab in slabs:
        if held + slab.staged > room:
            yield batch
            batch, held = [], 0
        batch.append(slab)
        held += slab.staged
    if batch:
        yield batch


def _read(file: SourceFile, batch: Sequence[_Slab], stage: Tensor, tick: Tick) -> None:
    wanted: list[tuple[int, memoryview]] = []
    converted: list[tuple[Tensor, Tensor]] = []
    used = 0
    for slab in batch:
        size = slab.dtype.itemsize
        buffer = slab.into
        if not slab.direct:
            buffer = stage[used : used + slab.box.count * size].view(slab.dtype).view(slab.box.shape)
            converted.append((slab.into, buffer))
            used += slab.staged
        memory, at = as_bytes(buffer), 0
        for first, count in runs(slab.box, slab.piece.box):
            wanted.append((slab.piece.begin + first * size, memory[at : at + count * size]))
            at += count * size
    wanted.sort(key=lambda item: item[0])
    file.storage.fetch(file.name, file.size, file.checksums, wanted, tick)
    for into, buffer in converted:
        into.copy_(buffer)
