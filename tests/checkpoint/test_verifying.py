"""Nothing that is not what was written passes for it, and what is lost is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from easymp import CheckpointError
from easymp.checkpoint import verify
from easymp.checkpoint.catalog import Damage
from easymp.checkpoint.manifest import COMMIT, MANIFEST

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


def test_no_checkpoint(root: Path) -> None:
    (root / OF_ONE / COMMIT).unlink()
    with pytest.raises(CheckpointError, match="not committed"):
        verify(root / OF_ONE)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        verify(root)
    assert Damage("a", "b") == Damage("a", "b", None, ())
