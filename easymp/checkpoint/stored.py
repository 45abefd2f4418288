"""What the tables of a manifest hold: files, and tensors that lie in them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from .boxes import Box, Shape

MANIFEST, COMMIT = "manifest.json", "COMMIT"
BLOCK = 2**24  # bytes under one checksum


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
