"""Nothing that is not what was written passes for it, and what is lost is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from easymp.checkpoint import verify
from easymp.checkpoint.catalog import Damage
from easymp.checkpoint.header import decode, encode
from easymp.checkpoint.layout import whole
from easymp.checkpoint.manifest import BLOCK, COMMIT, MANIFEST, FileRecord, Manifest, Piece, Stored, seal
from easymp.checkpoint.storage_local import LocalStorage
from easymp.errors import CheckpointError

from .samples import flip

OF_ONE, OF_TWO = "step-00000002", "step-00000003"
FIRST = "model-00001-of-00002.safetensors"


def test_good_ones_are_read_whole(samples: Path) -> None:
    for name in (OF_ONE, OF_TWO):
        read: list[int] = []
        assert verify(samples / name, read.append) == []
        assert sum(read) == sum(
            f.stat().st_size for f in (samples / name).iterdir() if f.name not in (MANIFEST, COMMIT)
        )


@pytest.mark.parametrize("at", [0, 9, 5000, -1])
def test_a_flipped_bit(root: Path, at: int) -> None:
    flip(root / OF_TWO / FIRST, at)
    (damage,) = verify(root / OF_TWO)
    assert (damage.file, damage.block, damage.why) == (FIRST, 0, "is not what was written")
    assert "model/embed.weight" in damage.tensors and not any(
        name.startswith("optimizer") for name in damage.tensors
    )
    assert verify(root / OF_ONE) == []


def test_truncated_longer_and_missing_files(root: Path) -> None:
    folder = root / OF_TWO
    names = sorted(f.name for f in folder.glob("*.safetensors"))[:4]
    whole = (folder / names[0]).read_bytes()
    (folder / names[0]).write_bytes(whole[:-1])
    with (folder / names[1]).open("ab") as file:
        file.write(b"x")
    (folder / names[2]).unlink()
    flip(folder / names[3], -1)
    found = verify(folder)
    assert [d.file for d in sorted(found, key=lambda d: d.file)] == names
    said = {d.file: d.why for d in found}
    assert said[names[0]] == f"has {len(whole) - 1} bytes, and {len(whole)} were written"
    assert "bytes, and" in said[names[1]]
    assert said[names[2]] == "is missing"
    assert all(d.tensors for d in found)


def test_blocks_are_told_apart(tmp_path: Path) -> None:
    """Three blocks, the first and the last damaged: the tensors of the middle one are not suspected."""
    shape = (BLOCK,)
    header, slots = encode([(name, torch.uint8, shape) for name in "abc"], {"format": "pt"})
    storage = LocalStorage(tmp_path)
    blank = bytes(BLOCK)
    crcs = storage.put("big.safetensors", [header, blank, blank, blank], slots[-1].end)
    manifest = Manifest(
        step=0,
        world_size=1,
        written="2026-01-01T00:00:00+00:00",
        made_by="a test",
        plan={},
        tensors={
            f"big/{n}": Stored(torch.uint8, shape, (Piece(whole(shape), "big.safetensors", s.begin),))
            for n, s in zip("abc", slots)
        },
        files={"big.safetensors": FileRecord(slots[-1].end, crcs)},
        states={},
    ).encode()
    storage.put(MANIFEST, [manifest], len(manifest))
    storage.put(COMMIT, [seal(manifest)], 65)
    assert verify(tmp_path) == []
    with (tmp_path / "big.safetensors").open("r+b") as file:
        for at in (5000, -1):
            file.seek(at, 0 if at > 0 else 2)
            file.write(b"\x01")
    assert [(d.block, d.tensors) for d in verify(tmp_path)] == [(0, ("big/a",)), (3, ("big/c",))]


def test_a_header_that_says_other_than_the_manifest(root: Path) -> None:
    """Checksums that fit what a liar wrote: other tools would read other tensors."""
    folder = root / OF_ONE
    file = next(folder.glob("model-*.safetensors"))
    text = file.read_bytes()
    length = 8 + int.from_bytes(text[:8], "little")
    slots = decode(text, len(text), file.name)
    names = list(slots)
    names[0], names[1] = names[1], names[0]
    header, _ = encode([(name, s.dtype, s.shape) for name, s in zip(names, slots.values())], {"format": "pt"})
    assert len(header) == length
    changed = header + text[length:]
    file.unlink()
    crcs = LocalStorage(folder).put(file.name, [changed], len(changed))
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][file.name]["crc32"] = list(crcs)
    encoded = json.dumps(manifest, separators=(",", ":")).encode()
    (folder / MANIFEST).write_bytes(encoded)
    (folder / COMMIT).write_bytes(seal(encoded))
    found = verify(folder)
    assert {name for d in found for name in d.tensors} == {f"model/{name}" for name in names[:2]}
    assert all("its header says other than the manifest" in d.why for d in found)


def test_no_checkpoint(root: Path) -> None:
    (root / OF_ONE / COMMIT).unlink()
    with pytest.raises(CheckpointError, match="not committed"):
        verify(root / OF_ONE)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        verify(root)
    assert Damage("a", "b") == Damage("a", "b", None, ())
