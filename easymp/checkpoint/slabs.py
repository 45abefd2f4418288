"""The parts in which a box of a stored tensor is read, and where each of them goes in memory.

Of columns, a file has short runs, thousands of them. They are read with what lies between, as one call, which storages read anyway
where they verify it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from .boxes import Box, overlap, runs, slices, span
from .manifest import Piece, Stored

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
