"""CRC-32, the one of zip and PNG, by the quickest code that is installed; and what is said when it does not fit."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Sequence
from functools import cache

from ..errors import CheckpointError
from .manifest import BLOCK

Buffer = bytes | bytearray | memoryview


@cache
def crc32() -> Callable[[Buffer, int], int]:
    """``crc32(buffer, value so far)``; all give the same value and let other threads run meanwhile.

    zlib is always there; isal and zlib-ng use wider instructions and are imported only when the first block is hashed.
    """
    for module in ("isal.isal_zlib", "zlib_ng.zlib_ng"):
        try:
            return importlib.import_module(module).crc32
        except ImportError:
            continue
    return zlib.crc32


def blocks(size: int) -> int:
    """How many BLOCKs a file of `size` bytes has; the last one may be shorter."""
    return -(-size // BLOCK)


def check(what: str, number: int, found: int, checksums: Sequence[int]) -> None:
    """Raises CheckpointError where block `number` of the file `what` has not the CRC-32 that was stored."""
    if found != checksums[number]:
        raise CheckpointError(
            f"{what}: block {number} (from byte {number * BLOCK}) is not what was written: its CRC-32 is {found:#010x}, not "
            f"{checksums[number]:#010x}. The file is damaged: load another checkpoint, or copy this file again from where it is whole"
        )


def check_size(what: str, found: int | None, size: int, checksums: Sequence[int] | None) -> None:
    """Raises CheckpointError where a file is missing or has not the `size` that was written, or not as many checksums."""
    if found is None:
        raise CheckpointError(
            f"{what}: no such file: the checkpoint is not whole; load another one, or copy this file again"
        )
    if found != size:
        raise CheckpointError(
            f"{what}: {found} bytes, and {size} were written: load another checkpoint, or copy this file again"
        )
    if checksums is not None and len(checksums) != blocks(size):
        raise CheckpointError(
            f"{what}: {len(checksums)} checksums for {blocks(size)} blocks: load another checkpoint"
        )
