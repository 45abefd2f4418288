"""The tensors of a checkpoint, one after the other, through little memory.

A file is read and verified by blocks of 16 MiB, so tensors that are neighbours are read together: one at a time, each block would be
read as often as there are tensors in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from .boxes import Box
from .manifest import BLOCK, Stored
from .storage import Tick, nothing
from .streaming import Want, stream
from .tensor_files import SourceFile

MOST = 2**30  # bytes read at once, however many files


def room(files: int) -> int:
    """Bytes to read at once of a checkpoint whose tensors lie in so many files: of each one a block, and a few at least."""
    return min(max(files, 4) * BLOCK, MOST)


def one_by_one(
    files: Mapping[str, SourceFile], wanted: Iterable[tuple[Stored, Box]], together: int, tick: Tick = nothing
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
            yield from _read(files, batch, tick)
            batch, held = [], 0
        batch.append(Want(stored, box, torch.empty(box.shape, dtype=stored.dtype)))
        held += size
    yield from _read(files, batch, tick)


def _read(files: Mapping[str, SourceFile], batch: list[Want], tick: Tick) -> Iterator[Tensor]:
    stream(files, batch)
    tick(
        sum(want.into.nbytes for want in batch)
    )  # not what was read for it: blocks at the edges are read twice
    while batch:
        yield batch.pop(0).into  # who takes it may let it go before the next
