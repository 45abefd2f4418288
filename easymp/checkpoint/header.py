"""The header of a safetensors file: 8 bytes of length, JSON, spaces up to a page, then tensors one after the other.

The format: https://huggingface.co/docs/safetensors (spaces after the JSON are part of it).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from ..errors import CheckpointError
from .strict import loads

PAGE = 4096
LONGEST = 100_000_000  # bytes of a header that the safetensors library still reads
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}


class Slot(NamedTuple):
    """A tensor in a file: bytes ``[begin, end)`` of the file, row-major."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def encode(
    tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: dict[str, str] | None = None
) -> tuple[bytes, list[Slot]]:
    """The bytes before the first tensor, and where each one of `tensors` goes, in their order."""
    table: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    places, at = [], 0
    for name, dtype, shape in tensors:
        if dtype not in NAMES:
            raise CheckpointError(f"{name}: safetensors has no type for {dtype}: convert the tensor before saving")
        size = prod(shape) * dtype.itemsize
        table[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        places.append((dtype, tuple(shape), at, at + size))
        at += size
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % PAGE)
    base = len(text) + 8
    return len(text).to_bytes(8, "little") + text, [Slot(d, s, base + b, base + e) for d, s, b, e in places]


def decode(text: bytes, size: int, what: str) -> dict[str, Slot]:
    """The tensors of a file of `size` bytes that begins with `text` (at least its header).

    Raises:
        CheckpointError: `text` is no header of such a file; `what` names it.
    """
    length = int.from_bytes(text[:8], "little")
    if len(text) < 8 or length > LONGEST or 8 + length > len(text):
        raise CheckpointError(f"{what}: no header of a safetensors file")
    table = loads(text[8 : 8 + length], what)
    base = 8 + length
    slots = {}
    for name, entry in table.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        slots[name] = Slot(DTYPES[entry["dtype"]], tuple(entry["shape"]), base + begin, base + end)
    return slots
