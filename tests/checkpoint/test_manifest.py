"""Manifests and headers of safetensors files come back as they were written; impossible ones are refused."""

from __future__ import annotations

import dataclasses
import json
import struct
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from easymp import CheckpointError, load_weights
from easymp.checkpoint import codec
from easymp.checkpoint.codec import NAMES, PAGE, REAL_DTYPES, Slot, decode_header, encode_header, in_file, nbytes
from easymp.checkpoint.manifest import BLOCK, Box, Chunk, FileRecord, Manifest, StoredTensor, decode, full_box

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
GOOD = Manifest(
    step=7,
    world_size=2,
    written="2026-01-01T00:00:00+00:00",
    made_by="easymp 0.1.0",
    plan={"strategy": {"value": "fsdp", "reason": "it was asked for", "source": "asked"}, "processes": 2},
    tensors={
        "model/w": StoredTensor(
            torch.float32, (4, 2), (Chunk(Box((0, 0), (2, 2)), A, 4096), Chunk(Box((2, 0), (2, 2)), B, 4096))
        ),
        "model/b": StoredTensor(torch.bfloat16, (), (Chunk(full_box(()), A, 4112),)),
        "model/empty": StoredTensor(torch.int64, (0, 3), (Chunk(full_box((0, 3)), B, 4112),)),
        "model/nowhere": StoredTensor(torch.complex128, (0,), ()),
    },
    files={A: FileRecord(4114, (1,)), B: FileRecord(BLOCK + 1, (0, 2**32 - 1)), "index.json": FileRecord(0, ())},
    states={"state/scheduler": {"last": 3, "of": {"$": "tuple", "items": [{"$": "tensor", "name": "model/b"}]}}},
    aliases={"model/head": "model/w"},
)


def test_one_without_files_of_hooks_is_of_the_version_that_knew_none():
    small, large = FileRecord(3, (7,)), FileRecord(BLOCK + 1, (1, 2))
    extra = {"unet/config.json": small, "unet/.metadata": large, "COMMIT.txt": FileRecord(0, ())}
    hooked = dataclasses.replace(GOOD, extra=extra)
    assert decode(hooked.encode(), "x") == hooked
    assert [json.loads(manifest.encode())["version"] for manifest in (GOOD, hooked)] == [1, 2]


FILE = {"size": 0, "crc32": []}


SHORT: dict[str, Any] = {"w": "model/w", "b": "model/b", "A": A, "0": 0, "1": 1, "2": 2, "3": 3}


def edited(**changes: Any) -> bytes:
    raw = json.loads(GOOD.encode())
    for path, value in changes.items():
        at, (*steps, last) = raw, (SHORT.get(step, step) for step in path.split("__"))
        for step in steps:
            at = at[step]
        if value is ...:
            del at[last]
        else:
            at[last] = value
    return json.dumps(raw).encode()


BAD: list[tuple[bytes, str]] = [
    (edited(version=...), "its version is None"),
    (edited(version=3, files=1), "format 3, and this easymp reads 2: update easymp"),
    (edited(extra={}), "has, which easymp does not write, 'extra'"),
    (edited(version=2, extra={"a": {"crc32": []}}), "lacks 'size'"),
    (edited(version=2, extra={"a": {"size": 4114, "crc32": [1]}}, tensors__w__pieces__0__2="a"), "none of the files"),
    (edited(version=2, extra={"a/B": FILE, "A/b/c": FILE}), "is a file of a"),
    (edited(version=2, extra={"a/b": FILE, "A/B": FILE}), "have one name"),
    (edited(more=1), "'more'"),
    (edited(files=[]), "as files, not a table"),
    (edited(step=-1), "step is -1"),
    (edited(written="\x1b[31m"), "written is"),
    (edited(block=2**20), "blocks of 1048576 bytes"),
    (edited(files__A__size=-1), "size of .* is -1"),
    (edited(files__A__size=2 * BLOCK), "so 2 checksums, and here are 1"),
    (edited(tensors__w__dtype="F31"), "unknown dtype 'F31'"),
    (edited(tensors__w__shape=[2**40, 2**40]), "cannot be of shape"),
    (edited(tensors__w__pieces=[]), "is in none"),
    (edited(tensors__w__pieces=[[[0, 0], [4, 2], A]]), "is in .*not offset"),
    (edited(tensors__w__pieces__0__0=["0", 0]), "not all whole numbers"),
    (edited(tensors__w__pieces__1__0=[1, 0]), "overlap"),
    (edited(tensors__w__pieces__1__1=[1, 2]), r"\[3, 0\] is in none"),
    (edited(tensors__w__pieces__0__2="other"), "none of the files"),
    (edited(tensors__b__pieces__0__3=4113), "begins at byte 4113"),
    (edited(tensors__b__pieces__0__3=4110), "lie in the same bytes"),
    (edited(aliases={"model/head": "model/v"}), "not stored"),
    (edited(aliases={"a": "b", "b": "a"}), "not stored"),
    (edited(aliases={"model/b": "model/w"}), "too"),
    (edited(states={"a": {"$": "pickle"}}), "'a': .*'pickle'"),
    (edited(states={"a": {"$": "tensor", "name": "b"}}), "which is not stored"),
]
for _name in (*" .. ../a /a a/b a\\b a\0b C:a .hidden a. COMMIT Manifest.JSON \u202ea".split(" "), "é" * 101):
    files = {**json.loads(GOOD.encode())["files"], _name: FILE}
    BAD.append((edited(files=files), "no plain name"))
OURS = ("COMMIT", "Manifest.JSON/a", A, f"{A.upper()}/a", "index.json")
LONG = ("a/" + "é" * 101, "/".join(["a" * 100] * 8))
for _name in (*" ../a /a a/ a//b a/../b a\\b a/b\nc C:a a/b.".split(" "), "a/ b", *LONG, *OURS):
    _message = "one that is the checkpoint's own" if _name in OURS else "no name that every file system takes"
    BAD.append((edited(version=2, extra={_name: FILE}), _message))


def test_what_cannot_be_is_refused():
    for text, message in BAD:
        with pytest.raises(CheckpointError, match=f"^some/manifest.json: .*{message}") as caught:
            decode(text, "some/manifest.json")
        assert len(str(caught.value)) < 700


def test_what_would_not_be_read_is_not_written():
    for changes in ({"plan": {"a": object()}}, {"made_by": "\ud800"}):
        with pytest.raises(CheckpointError, match="cannot be stored as JSON"):
            dataclasses.replace(GOOD, **changes).encode()


# The library writes it, and its torch loader lacks its name (0.8); its `safe_open` reads it.
NOT_BY_LOAD_FILE = {torch.float8_e8m0fnu}
SHAPES = ((), (0,), (5,), (2, 0, 3), (1, 2, 6))


def content(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def sample_tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors of bytes that any dtype takes as numbers."""
    tensors = {}
    for i, shape in enumerate(SHAPES):
        count = nbytes(dtype, shape)
        memory = torch.arange(count, dtype=torch.uint8) % (2 if dtype is torch.bool else 61)
        tensor = memory.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
        tensors[f"block.{i}.weight[0:{len(shape)}] é"] = tensor
    return tensors


def test_the_library_reads_what_we_write_and_we_what_it_writes(tmp_path):
    path = tmp_path / "a.safetensors"
    for dtype in NAMES:
        tensors = sample_tensors(dtype)
        described = [(name, t.dtype, t.shape) for name, t in tensors.items()]
        text, slots = encode_header(described, {"format": "pt"})
        path.write_bytes(text + b"".join(map(content, tensors.values())))
        assert slots[0].begin % PAGE == 0
        loaded = {} if dtype in NOT_BY_LOAD_FILE else safetensors.torch.load_file(path)
        with safetensors.safe_open(path, "pt") as file:
            assert set(file.keys()) == set(tensors) and file.metadata() == {"format": "pt"}
            for name, tensor in tensors.items():
                for read_tensor in (file.get_tensor(name), loaded.get(name, file.get_tensor(name))):
                    assert (read_tensor.dtype, tuple(read_tensor.shape)) == in_file(tensor.dtype, tensor.shape)
                    assert content(read_tensor) == content(
                        torch.view_as_real(tensor) if dtype in REAL_DTYPES else tensor
                    )
        read, metadata = decode_header(path.read_bytes(), path.stat().st_size, "a")
        assert metadata == {"format": "pt"}
        assert read == {n: Slot(*in_file(s.dtype, s.shape), s.begin, s.end) for n, s in zip(tensors, slots)}
        if dtype in REAL_DTYPES:
            continue
        tensors["odd"] = torch.ones(3, dtype=torch.uint8)
        safetensors.torch.save_file(tensors, path, {"any": "word"})
        text = path.read_bytes()
        read, _ = decode_header(text, len(text), "a")
        assert {n: (s.dtype, s.shape) for n, s in read.items()} == {
            n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()
        }
        assert all(text[s.begin : s.end] == content(tensors[name]) for name, s in read.items())


def test_metadata_null_is_read_as_the_library_reads_it(tmp_path):
    header = b'{"__metadata__": null, "weight": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}}'
    (tmp_path / "w.safetensors").write_bytes(put(header, 0) + struct.pack("<f", 3.0))
    net = torch.nn.Linear(1, 1, bias=False)
    load_weights(net, tmp_path / "w.safetensors")
    assert net.weight.item() == 3.0


ENTRIES = {
    "v": {"dtype": "I8", "shape": [2, 2], "data_offsets": [0, 4]},
    "w": {"dtype": "F32", "shape": [3], "data_offsets": [4, 16]},
}


def put(table: object, data: int = 16) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + b"\0" * data


def changed(**fields: object) -> bytes:
    return put({**ENTRIES, "w": {**ENTRIES["w"], **fields}})


HOSTILE = [
    (b"", "not a safetensors file: it does not begin"),
    (put(b"{]"), "not JSON"),
    (put({"__metadata__": {"a": 1}}, 0), "__metadata__"),
    (put({"__metadata__": []}, 0), "__metadata__"),
    (put({"w": 1}, 0), "not described by"),
    (changed(dtype="F31"), "the unknown dtype 'F31'"),
    (changed(dtype="C128", shape=[1]), "the unknown dtype 'C128'"),
    (changed(shape=[2**32, 2**32, 3]), "the shape"),
    (changed(shape=[4]), "and has 16: damaged"),
    (changed(data_offsets=[8, 20]), "of 16 bytes, and has 12"),
    (changed(shape=[4], data_offsets=[0, 16]), "overlaps"),
    (put({"w": {"dtype": "I8", "shape": [2], "data_offsets": [1, 3]}}, 3), "leaves 1 bytes"),
    (put(ENTRIES, 17), "1 bytes after the last tensor"),
]


def test_what_is_no_such_file_is_refused():
    for text, message in HOSTILE:
        with pytest.raises(CheckpointError, match=f"^some/file: .*{message}"):
            decode_header(text, len(text), "some/file")


def test_a_header_bomb_is_refused_unread():
    count = codec.LONGEST_HEADER + 1
    with pytest.raises(CheckpointError, match="not begin with a header's length"):
        decode_header(count.to_bytes(8, "little"), 2**50, "x")
    with pytest.raises(CheckpointError, match="cut short"):
        decode_header((5000).to_bytes(8, "little") + b"{", 2**50, "x")
