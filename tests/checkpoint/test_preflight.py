"""Before a byte is read, files that are not those of the manifest are named, and so is the tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from easymp.checkpoint.header import encode
from easymp.checkpoint.layout import Box, whole
from easymp.checkpoint.manifest import FileRecord, Manifest, Piece, Stored
from easymp.checkpoint.read_plan import preflight
from easymp.checkpoint.snapshot import key
from easymp.checkpoint.storage_local import LocalStorage
from easymp.errors import CheckpointError

STEP, FILE, INDEX = "step-1", "model-00001-of-00001.safetensors", "model.safetensors.index.json"
SHAPES = {
    "model/w": (torch.float32, (4, 2), [Box((0, 0), (2, 2)), Box((2, 0), (2, 2))]),
    "model/c": (torch.complex128, (2,), [whole((2,))]),
}


@pytest.fixture
def written(tmp_path: Path) -> tuple[LocalStorage, Manifest]:
    """A file with a tensor in two pieces, a whole one, and an empty one; and an index beside it."""
    shapes = {**SHAPES, "model/empty": (torch.int8, (0, 3), [whole((0, 3))])}
    (tmp_path / STEP).mkdir()
    storage = LocalStorage(tmp_path)
    held = [(name, dtype, shape, box) for name, (dtype, shape, boxes) in shapes.items() for box in boxes]
    head, slots = encode(
        [(key(name, box, shape), dtype, box.shape) for name, dtype, shape, box in held], {"format": "pt"}
    )
    size = slots[-1].end
    pieces: dict[str, list[Piece]] = {}
    for (name, _, _, box), slot in zip(held, slots):
        pieces.setdefault(name, []).append(Piece(box, FILE, slot.begin))
    files = {
        FILE: FileRecord(size, storage.put(f"{STEP}/{FILE}", [head, bytes(size - len(head))], size)),
        INDEX: FileRecord(2, storage.put(f"{STEP}/{INDEX}", [b"{}"], 2)),
    }
    tensors = {name: Stored(dtype, shape, tuple(pieces[name])) for name, (dtype, shape, _) in shapes.items()}
    return storage, Manifest(1, 1, "2026-01-01", "a test", {}, tensors, files, {})


def test_what_was_written_passes(written: tuple[LocalStorage, Manifest]) -> None:
    storage, manifest = written
    preflight(storage, STEP, manifest, manifest.files)
    preflight(LocalStorage(f"{storage.place}/{STEP}"), "", manifest, manifest.files)


def table(path: Path, edit: Callable[[dict[str, dict[str, object]]], None]) -> None:
    """Another header of the same length."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + length])
    edit(entries)
    path.write_bytes(
        content[:8]
        + json.dumps(entries, separators=(",", ":")).encode().ljust(length)
        + content[8 + length :]
    )


def swap(entries: dict[str, dict[str, object]]) -> None:
    first, second = (entries[f"w[{rows},0:2]"] for rows in ("0:2", "2:4"))
    first["data_offsets"], second["data_offsets"] = second["data_offsets"], first["data_offsets"]


def link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


WRONG: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "missing": (FILE, Path.unlink, "is missing, or no regular file"),
    "a link": (FILE, link, "is missing, or no regular file"),
    "a pipe": (FILE, pipe, "is missing, or no regular file"),
    "a folder": (INDEX, lambda p: (p.unlink(), p.mkdir()), "is missing, or no regular file"),
    "cut short": (FILE, lambda p: p.write_bytes(p.read_bytes()[:-1]), "were written"),
    "longer": (INDEX, lambda p: p.write_bytes(b"{} "), "has 3 bytes, and 2 were written"),
    "another header": (FILE, lambda p: p.write_bytes(b"\xff" * p.stat().st_size), "no safetensors file"),
    "another name": (FILE, lambda p: table(p, lambda t: t.update(d=t.pop("c"))), r"of 'c': nothing, not torch.float64"),
    "another dtype": (FILE, lambda p: table(p, lambda t: t["c"].update(dtype="I64")), r"'c': torch.int64 \[2, 2\]"),
    "another shape": (FILE, lambda p: table(p, lambda t: t["c"].update(shape=[4])), r"'c': torch.float64 \[4\]"),
    "pieces in each other's place": (FILE, lambda p: table(p, swap), r"'w\[0:2,0:2\]': torch.float32 \[2, 2\] in bytes 4112 to 4128"),
    "one more": (FILE, lambda p: table(p, lambda t: t.update(x={**t["empty"]})), "'x': torch.int8"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(written: tuple[LocalStorage, Manifest], name: str) -> None:
    storage, manifest = written
    file, damage, words = WRONG[name]
    path = Path(storage.place, STEP, file)
    damage(path)
    with pytest.raises(CheckpointError, match=f"{STEP}/{file}: .*{words}"):
        preflight(storage, STEP, manifest, [file])
    preflight(storage, STEP, manifest, [other for other in manifest.files if other != file])
