"""Headers of safetensors files: the library reads ours, we read the library's, and nothing else passes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from easymp import CheckpointError
from easymp.checkpoint import codec
from easymp.checkpoint.codec import NAMES, PAGE, PARTS, Slot, decode_header, encode_header, filed, nbytes

# The library writes these, and its torch loader lacks their names (0.8); its `safe_open` reads them.
NOT_BY_LOAD_FILE = {torch.float4_e2m1fn_x2, torch.float8_e8m0fnu}
SHAPES = ((), (0,), (5,), (2, 0, 3), (1, 2, 6))


def content(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def some(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """A tensor of bytes that any dtype takes as a number."""
    count = nbytes(dtype, tuple(shape))
    assert count is not None
    memory = torch.arange(count, dtype=torch.uint8) % (2 if dtype is torch.bool else 61)
    return memory.view(dtype).reshape(shape) if count else torch.empty(tuple(shape), dtype=dtype)


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> list[Slot]:
    text, slots = encode_header([(name, t.dtype, t.shape) for name, t in tensors.items()], metadata)
    path.write_bytes(text + b"".join(map(content, tensors.values())))
    return slots


@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())
def test_the_library_reads_what_we_write(tmp_path: Path, dtype: torch.dtype) -> None:
    shapes = [shape for shape in SHAPES if shape or dtype is not torch.float4_e2m1fn_x2]
    tensors = {f"block.{i}.weight[0:{len(s)}] é": some(dtype, s) for i, s in enumerate(shapes)}
    path = tmp_path / "a.safetensors"
    slots = write(path, tensors, {"format": "pt"})
    assert slots[0].begin % PAGE == 0
    whole = {} if dtype in NOT_BY_LOAD_FILE else safetensors.torch.load_file(path)
    with safetensors.safe_open(path, "pt") as file:
        assert set(file.keys()) == set(tensors) and file.metadata() == {"format": "pt"}
        for name, tensor in tensors.items():
            for found in (file.get_tensor(name), whole.get(name)):
                if found is not None:
                    assert (found.dtype, tuple(found.shape)) == filed(tensor.dtype, tensor.shape)
                    assert content(found) == content(torch.view_as_real(tensor) if dtype in PARTS else tensor)
    read, metadata = decode_header(path.read_bytes(), path.stat().st_size, "a")
    assert metadata == {"format": "pt"}
    assert read == {name: Slot(*filed(s.dtype, s.shape), s.begin, s.end) for name, s in zip(tensors, slots)}


@pytest.mark.parametrize("dtype", [dtype for dtype in NAMES if dtype not in PARTS], ids=str)
def test_we_read_what_the_library_writes(tmp_path: Path, dtype: torch.dtype) -> None:
    shapes = [shape for shape in SHAPES if shape or dtype is not torch.float4_e2m1fn_x2]
    tensors = {str(i): some(dtype, s) for i, s in enumerate(shapes)} | {
        "odd": torch.ones(3, dtype=torch.uint8)
    }
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(tensors, path, {"any": "word"})
    text = path.read_bytes()
    read, _ = decode_header(text, len(text), "a")
    assert set(read) == set(tensors)
    for name, (found, shape, begin, end) in read.items():
        assert (found, shape) == (tensors[name].dtype, tuple(tensors[name].shape))
        assert text[begin:end] == content(tensors[name])


GOOD = {
    "v": {"dtype": "I8", "shape": [2, 2], "data_offsets": [0, 4]},
    "w": {"dtype": "F32", "shape": [3], "data_offsets": [4, 16]},
}


def put(table: object, data: int = 16) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + b"\0" * data


def changed(**fields: object) -> bytes:
    return put({**GOOD, "w": {**GOOD["w"], **fields}})


HOSTILE = {
    "nothing": (b"", "not a safetensors file: it does not begin"),
    "not JSON": (put(b"{]"), "not JSON"),
    "metadata of numbers": (put({"__metadata__": {"a": 1}}, 0), "__metadata__"),
    "metadata an empty list": (put({"__metadata__": []}, 0), "__metadata__"),
    "entry a number": (put({"w": 1}, 0), "not described by"),
    "dtype unknown": (changed(dtype="F31"), "the unknown dtype 'F31'"),
    "dtype of ours alone": (changed(dtype="C128", shape=[1]), "the unknown dtype 'C128'"),
    "shape that overflows": (changed(shape=[2**32, 2**32, 3]), "the shape"),
    "shape larger than bytes": (changed(shape=[4]), "and has 16: damaged"),
    "places: beyond": (changed(data_offsets=[8, 20]), "of 16 bytes, and has 12"),
    "overlap": (changed(shape=[4], data_offsets=[0, 16]), "overlaps"),
    "hole": (put({"w": {"dtype": "I8", "shape": [2], "data_offsets": [1, 3]}}, 3), "leaves 1 bytes"),
    "more after": (put(GOOD, 17), "1 bytes after the last tensor"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_such_file_is_refused(name: str) -> None:
    text, words = HOSTILE[name]
    with pytest.raises(CheckpointError, match=f"^some/file: .*{words}"):
        decode_header(text, len(text), "some/file")


def test_a_header_bomb_is_refused_unread() -> None:
    count = codec.LONGEST_HEADER + 1
    with pytest.raises(CheckpointError, match="not begin with a header's length"):
        decode_header(count.to_bytes(8, "little"), 2**50, "x")
    with pytest.raises(CheckpointError, match="cut short"):
        decode_header((5000).to_bytes(8, "little") + b"{", 2**50, "x")
