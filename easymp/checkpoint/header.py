"""The header of a safetensors file: 8 bytes of length, JSON, spaces up to a page, then tensors one after the other.

The format: https://huggingface.co/docs/safetensors (spaces after the JSON are part of it). The types are those of version 0.8 of the
library. It lacks complex128 and complex32: they are written as pairs of F64 and F16 in a last dimension of 2, as `torch.view_as_real`
shows them. The bytes are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError
from .codec import dumps, loads

PAGE = 4096
LONGEST_HEADER = 100_000_000  # bytes of a header that the safetensors library still reads
MOST = 2**63 - 1  # bytes in a file or a tensor
DIMENSIONS = 64  # torch's limit
FLOAT4 = torch.float4_e2m1fn_x2  # two values a byte: the format counts values, torch counts bytes
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e8m0fnu: "F8_E8M0", FLOAT4: "F4",
    torch.complex64: "C64", torch.complex128: "C128", torch.complex32: "C32",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}
PARTS = {
    torch.complex128: torch.float64,
    torch.complex32: torch.float16,
}  # types that safetensors has no name for


class Slot(NamedTuple):
    """A tensor in a file: bytes ``[begin, end)`` of the file, row-major."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def filed(dtype: torch.dtype, shape: Sequence[int]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape of a tensor in a file; complex types without a safetensors name get one more dimension of 2."""
    return (PARTS[dtype], (*shape, 2)) if dtype in PARTS else (dtype, tuple(shape))


def nbytes(dtype: torch.dtype, shape: object) -> int | None:
    """Bytes of a tensor; None where a torch tensor cannot have this `shape`."""
    if not isinstance(shape, (list, tuple)) or len(shape) > DIMENSIONS:
        return None
    # Checked even if another dimension is 0: torch multiplies all of them for the strides.
    if any(type(n) is not int or n < 0 for n in shape) or prod(n or 1 for n in shape) * dtype.itemsize > MOST:
        return None
    return prod(shape) * dtype.itemsize


def encode_header(
    tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: dict[str, str] | None = None
) -> tuple[bytes, list[Slot]]:
    """The bytes before the first tensor, and the slot of each of `tensors`, in their order."""
    table: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    places, at = [], 0
    for name, dtype, shape in tensors:
        if dtype not in NAMES:
            raise CheckpointError(
                f"{name}: safetensors has no type for {dtype}: convert the tensor before saving"
            )
        size = nbytes(dtype, tuple(shape))
        if size is None or at + size > MOST:
            raise CheckpointError(f"{name}: a file cannot hold a tensor of shape {list(shape)}")
        if name in table or name == "__metadata__":
            raise CheckpointError(f"{name}: two tensors of a file have this name: rename one of them")
        kept, dims = filed(dtype, shape)
        if kept is FLOAT4:
            if not dims:
                raise CheckpointError(
                    f"{name}: safetensors stores {dtype} in one dimension or more: use .reshape(1)"
                )
            dims = (*dims[:-1], 2 * dims[-1])
        table[name] = {"dtype": NAMES[kept], "shape": dims, "data_offsets": [at, at + size]}
        places.append((dtype, tuple(shape), at, at + size))
        at += size
    text = dumps(table)
    text += b" " * (-(len(text) + 8) % PAGE)
    if len(text) > LONGEST_HEADER:
        raise CheckpointError(
            f"{len(places)} names take {len(text)} bytes, and a header {LONGEST_HEADER} at most: use several files"
        )
    base = len(text) + 8
    return len(text).to_bytes(8, "little") + text, [Slot(d, s, base + b, base + e) for d, s, b, e in places]


def header_length(text: bytes, size: int, what: str) -> int:
    """Bytes before the data of a file of `size` bytes, from its first 8."""
    count = int.from_bytes(text[:8], "little")
    if len(text) < 8 or count > LONGEST_HEADER or 8 + count > size:
        raise CheckpointError(
            f"{what}: not a safetensors file: {size} bytes, and the first 8 ({text[:8].hex()}) are not the length of a header"
        )
    return 8 + count


def decode_header(text: bytes, size: int, what: str) -> tuple[dict[str, Slot], dict[str, str]]:
    """The tensors of a file of `size` bytes that begins with `text` (at least its header), and its metadata.

    Raises:
        CheckpointError: `text` is not the header of such a file; `what` names it.
    """
    base = header_length(text, size, what)
    if len(text) < base:
        raise CheckpointError(
            f"{what}: {len(text)} bytes of a header of {base} could be read: cut short; load another file"
        )
    table = loads(text[8:base], what)
    if text[8:9] != b"{" or not isinstance(table, dict):
        raise CheckpointError(f"{what}: not a safetensors file: its header is not a table")
    metadata = table.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(word, str) for word in metadata.values()):
        raise CheckpointError(f"{what}: not a safetensors file: __metadata__ does not map words to words")
    slots = {name: _slot(entry, base, size, f"{what}: {name!r}") for name, entry in table.items()}
    at = base
    for slot, name in sorted(((slot[2:], name) for name, slot in slots.items())):
        if slot[0] != at:
            said = (
                "overlaps with the tensor before it"
                if slot[0] < at
                else f"leaves {slot[0] - at} bytes before it unused"
            )
            raise CheckpointError(f"{what}: {name!r} {said}: damaged, or not a safetensors file")
        at = slot[1]
    if at != size:
        raise CheckpointError(
            f"{what}: {size - at} bytes after the last tensor: damaged, or not a safetensors file"
        )
    return slots, metadata


def _slot(entry: Any, base: int, size: int, what: str) -> Slot:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{what} is not described by dtype, shape and data_offsets alone: damaged")
    name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None or dtype in PARTS:
        raise CheckpointError(
            f"{what} has the unknown dtype {name!r:.40}: update easymp, or convert the file"
        )
    if dtype is FLOAT4 and isinstance(shape, list) and shape:
        shape = [*shape[:-1], shape[-1] // 2 if type(shape[-1]) is int and shape[-1] % 2 == 0 else None]
    count = nbytes(dtype, shape)
    if count is None or (dtype is FLOAT4 and not shape):
        raise CheckpointError(f"{what} has the shape {entry['shape']!r:.80}, which a {dtype} cannot have")
    if not isinstance(offsets, list) or [*map(type, offsets)] != [int, int]:
        raise CheckpointError(f"{what} lies at {offsets!r:.80}, which are not two places")
    begin, end = offsets
    if not 0 <= begin <= end <= size - base or end - begin != count:
        raise CheckpointError(
            f"{what} lies at {offsets}, and needs {count} bytes of the {size - base} after the header: damaged, or cut short"
        )
    return Slot(dtype, tuple(shape), base + begin, base + end)
