"""A manifest comes back as it was written, and one that says what cannot be is refused before anyone acts on it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from easymp import CheckpointError
from easymp.checkpoint.manifest import BLOCK, Box, FileRecord, Manifest, Piece, Stored, decode, whole

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
GOOD = Manifest(
    step=7,
    world_size=2,
    written="2026-01-01T00:00:00+00:00",
    made_by="easymp 0.1.0",
    plan={"strategy": {"value": "fsdp", "reason": "it was asked for", "source": "asked"}, "processes": 2},
    tensors={
        "model/w": Stored(
            torch.float32, (4, 2), (Piece(Box((0, 0), (2, 2)), A, 4096), Piece(Box((2, 0), (2, 2)), B, 4096))
        ),
        "model/b": Stored(torch.bfloat16, (), (Piece(whole(()), A, 4112),)),
        "model/empty": Stored(torch.int64, (0, 3), (Piece(whole((0, 3)), B, 4112),)),
        "model/nowhere": Stored(torch.complex128, (0,), ()),
    },
    files={
        A: FileRecord(4114, (1,)),
        B: FileRecord(BLOCK + 1, (0, 2**32 - 1)),
        "index.json": FileRecord(0, ()),
    },
    states={
        "state/scheduler": {"last": 3, "of": {"$": "tuple", "items": [{"$": "tensor", "name": "model/b"}]}}
    },
    aliases={"model/head": "model/w"},
)


def test_one_without_files_of_hooks_is_of_the_version_that_knew_none() -> None:
    one, two = FileRecord(3, (7,)), FileRecord(BLOCK + 1, (1, 2))
    extra = {"unet/config.json": one, "unet/.metadata": two, "COMMIT.txt": FileRecord(0, ())}
    more = dataclasses.replace(GOOD, extra=extra)
    assert decode(more.encode(), "x") == more
    assert [json.loads(it.encode())["version"] for it in (GOOD, more)] == [1, 2]


FILE = {"size": 0, "crc32": []}


def edited(**changes: Any) -> bytes:
    raw = json.loads(GOOD.encode())
    for path, value in changes.items():
        at: Any = raw
        *steps, last = path.split("__")
        for step in steps:
            at = at[
                int(step)
                if isinstance(at, list)
                else {"w": "model/w", "b": "model/b", "A": A, "B": B, "index": "index.json"}.get(step, step)
            ]
        if isinstance(value, type(...)):
            del at[last]
        else:
            at[int(last) if isinstance(at, list) else {"w": "model/w", "A": A}.get(last, last)] = value
    return json.dumps(raw).encode()


BAD: dict[str, tuple[bytes, str]] = {
    "no version": (edited(version=...), "its version is None"),
    "newer": (edited(version=3, files=1), "format 3, and this easymp reads 2: update easymp"),
    "version 1 with files of hooks": (edited(extra={}), "has, which easymp does not write, 'extra'"),
    "file of a hook without a size": (edited(version=2, extra={"a": {"crc32": []}}), "lacks 'size'"),
    "tensor in a file of a hook": (
        edited(version=2, extra={"a": {"size": 4114, "crc32": [1]}}, tensors__w__pieces__0__2="a"),
        "none of the files",
    ),
    "file and folder of hooks": (edited(version=2, extra={"a/B": FILE, "A/b/c": FILE}), "is a file of a"),
    "files of hooks of one name": (edited(version=2, extra={"a/b": FILE, "A/B": FILE}), "have one name"),
    "a field more": (edited(more=1), "'more'"),
    "files a list": (edited(files=[]), "as files, not a table"),
    "step negative": (edited(step=-1), "step is -1"),
    "written in colours": (edited(written="\x1b[31m"), "written is"),
    "block of another size": (edited(block=2**20), "blocks of 1048576 bytes"),
    "file of negative size": (edited(files__A__size=-1), "size of .* is -1"),
    "file of more blocks": (edited(files__A__size=2 * BLOCK), "so 2 checksums, and here are 1"),
    "dtype unknown": (edited(tensors__w__dtype="F31"), "unknown dtype 'F31'"),
    "shape that overflows": (edited(tensors__w__shape=[2**40, 2**40]), "cannot be of shape"),
    "no pieces": (edited(tensors__w__pieces=[]), "is in none"),
    "piece of three": (edited(tensors__w__pieces=[[[0, 0], [4, 2], A]]), "is in .*not offset"),
    "piece of words": (edited(tensors__w__pieces__0__0=["0", 0]), "not all whole numbers"),
    "pieces that overlap": (edited(tensors__w__pieces__1__0=[1, 0]), "overlap"),
    "pieces with a hole": (edited(tensors__w__pieces__1__1=[1, 2]), r"\[3, 0\] is in none"),
    "piece in no file": (edited(tensors__w__pieces__0__2="other"), "none of the files"),
    "piece that ends behind the file": (edited(tensors__b__pieces__0__3=4113), "begins at byte 4113"),
    "the same bytes twice": (edited(tensors__b__pieces__0__3=4110), "lie in the same bytes"),
    "alias of nothing": (edited(aliases={"model/head": "model/v"}), "not stored"),
    "aliases in a circle": (edited(aliases={"a": "b", "b": "a"}), "not stored"),
    "alias that is stored": (edited(aliases={"model/b": "model/w"}), "too"),
    "state of an unknown kind": (edited(states={"a": {"$": "pickle"}}), "'a': .*'pickle'"),
    "state with a tensor that is not there": (
        edited(states={"a": {"$": "tensor", "name": "b"}}),
        "which is not stored",
    ),
}
for _name in (*" .. ../a /a a/b a\\b a\0b C:a .hidden a. COMMIT Manifest.JSON \u202ea".split(" "), "é" * 101):
    files = {**json.loads(GOOD.encode())["files"], _name: FILE}
    BAD[f"file called {_name!r}"] = (edited(files=files), "no plain name")
OURS = ("COMMIT", "Manifest.JSON/a", A, f"{A.upper()}/a", "index.json")
LONG = ("a/" + "é" * 101, "/".join(["a" * 100] * 8))
for _name in (*" ../a /a a/ a//b a/../b a\\b a/b\nc C:a a/b.".split(" "), "a/ b", *LONG, *OURS):
    _words = "one that is the checkpoint's own" if _name in OURS else "no name that every file system takes"
    BAD[f"file of a hook called {_name!r}"] = (edited(version=2, extra={_name: FILE}), _words)


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_refused(name: str) -> None:
    text, words = BAD[name]
    with pytest.raises(CheckpointError, match=f"^some/manifest.json: .*{words}") as caught:
        decode(text, "some/manifest.json")
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"plan": {"a": (1, 2)}}, "the plan of a checkpoint"),
        ({"plan": {"a": object()}}, "cannot be stored as JSON"),
        ({"aliases": {"a": "b"}}, "not stored"),
        ({"made_by": "\ud800"}, "made_by is"),
    ],
)
def test_what_would_not_be_read_is_not_written(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        dataclasses.replace(GOOD, **changes).encode()
