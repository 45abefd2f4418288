"""What the tables of a manifest hold: files, and tensors that lie in them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from .boxes import Box, Shape

MANIFEST, COMMIT = "manifest.json", "COMMIT"
BLOCK = 2**24  # bytes under one checksum


OLDEST = "0"
"""The line of all checkpoints that name none: those of easymp 0.1."""


@dataclass(frozen=True)
class Lineage:
    """Which line of saves a checkpoint belongs to. A run that goes on from the last checkpoint of a line continues that line.

    Attributes:
        line: its identifier.
        parent: name of the checkpoint that was loaded or saved before this one; "" for the first of a run that loaded none.
        forks: the lines that led to this one, and where each was left: line, and `written` and `step` of its last checkpoint that
            counts here. What was saved later on those lines is abandoned.
    """

    line: str = OLDEST
    parent: str = ""
    forks: tuple[tuple[str, str, int], ...] = ()


class Piece(NamedTuple):
    """A box of a tensor, row-major from byte `begin` of a file of the same folder."""

    box: Box
    file: str
    begin: int


@dataclass(frozen=True)
class Stored:
    """A tensor; `pieces` cover it exactly once."""

    dtype: torch.dtype
    shape: Shape
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        """In the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileRecord:
    """A file: its size in bytes, and the CRC-32 of each `BLOCK` of it, the last one shorter."""

    size: int
    checksums: tuple[int, ...]
