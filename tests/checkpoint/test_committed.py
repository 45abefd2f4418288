"""What makes a folder a checkpoint: a manifest, and the COMMIT that seals it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from easymp.checkpoint.folders import is_committed, open_manifest
from easymp.checkpoint.layout import whole
from easymp.checkpoint.manifest import COMMIT, MANIFEST, FileRecord, Manifest, Piece, Stored, seal
from easymp.checkpoint.storage_local import LocalStorage
from easymp.errors import CheckpointError

STEP = "step-00000007"
GOOD = Manifest(
    step=7,
    world_size=1,
    written="2026-01-01T00:00:00Z",
    made_by="easymp 0",
    plan={},
    tensors={"model/w": Stored(torch.float32, (2,), (Piece(whole((2,)), "model.safetensors", 4096),))},
    files={"model.safetensors": FileRecord(4104, (0,))},
    states={},
)


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    (tmp_path / STEP).mkdir()
    (tmp_path / STEP / MANIFEST).write_bytes(GOOD.encode())
    (tmp_path / STEP / COMMIT).write_bytes(seal(GOOD.encode()))
    return LocalStorage(tmp_path)


def test_a_committed_manifest_comes_back(storage: LocalStorage) -> None:
    assert is_committed(storage, STEP)
    assert open_manifest(storage, STEP) == GOOD
    itself = LocalStorage(f"{storage.place}/{STEP}")
    assert is_committed(itself, "") and open_manifest(itself, "") == GOOD


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ((COMMIT,), "not committed"),
        ((MANIFEST,), f"{MANIFEST} is missing"),
        ((MANIFEST, COMMIT), "no checkpoint: neither"),
    ],
)
def test_half_of_one_is_none(storage: LocalStorage, gone: tuple[str, ...], words: str) -> None:
    for name in gone:
        Path(storage.place, STEP, name).unlink()
    assert not is_committed(storage, STEP)
    with pytest.raises(CheckpointError, match=f"{STEP}: {words}"):
        open_manifest(storage, STEP)


@pytest.mark.parametrize("name", [MANIFEST, COMMIT])
def test_every_byte_of_both_is_sealed(storage: LocalStorage, name: str) -> None:
    path = Path(storage.place, STEP, name)
    good = path.read_bytes()
    for at in range(0, len(good), 7 if name == MANIFEST else 1):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        assert not is_committed(storage, STEP)
        with pytest.raises(CheckpointError, match="was changed"):
            open_manifest(storage, STEP)
    for text in (good[:-1], good + b"\n", b""):
        path.write_bytes(text)
        assert not is_committed(storage, STEP)
        with pytest.raises(CheckpointError, match=rf"was changed|{COMMIT}: more than"):
            open_manifest(storage, STEP)


def test_a_link_is_no_manifest(storage: LocalStorage, tmp_path: Path) -> None:
    path = Path(storage.place, STEP, MANIFEST)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert not is_committed(storage, STEP)
    with pytest.raises(CheckpointError, match=f"{MANIFEST} is missing"):
        open_manifest(storage, STEP)


def test_another_format_says_what_to_do(storage: LocalStorage) -> None:
    text = GOOD.encode().replace(b'"version":1', b'"version":3')
    Path(storage.place, STEP, MANIFEST).write_bytes(text)
    Path(storage.place, STEP, COMMIT).write_bytes(seal(text))
    assert is_committed(storage, STEP)
    with pytest.raises(CheckpointError, match=r"version 3.*update easymp"):
        open_manifest(storage, STEP)
