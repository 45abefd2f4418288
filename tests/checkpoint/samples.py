"""Checkpoints of real trainings, for tests that look at them; written once a session and copied by who damages one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from easymp import Accelerator
from tests.conftest import Ranks
from tests.pool import Pool
from tests.strategies.models import make


def train(strategy: str, kind: str, folder: str, steps: int, seed: int = 0) -> None:
    """A few updates, then `folder`."""
    acc = Accelerator(strategy=strategy)
    model = make(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, 20)
    model, optimizer, schedule = acc.prepare(model, optimizer, schedule)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(8, 12, generator=generator)
        loss = nn.functional.cross_entropy(model(x), torch.arange(8) % 5)
        acc.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    acc.save_state(folder)
    acc.close()


@pytest.fixture(scope="session")
def samples(_pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``step-00000002`` of one process, and ``step-00000003`` of two with fsdp, both of the model "tied", on one
    line."""
    root = tmp_path_factory.mktemp("samples")
    ranks = Ranks(_pool)
    ranks(train, "single", "tied", str(root / "step-00000002"), 2, processes=1)
    ranks(train, "fsdp", "tied", str(root / "step-00000003"), 3, processes=2)
    rewrite(root / "step-00000003", lineage={**lineage_of(root / "step-00000002"), "parent": "step-00000002"})
    return root


def lineage_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_bytes())["plan"]["lineage"]


def rewrite(folder: Path, lineage: dict[str, Any] | None, **more: Any) -> None:
    """Change what a manifest says; without a `lineage` it is as easymp 0.1 wrote it."""
    said = json.loads((folder / "manifest.json").read_bytes()) | more
    said["plan"].pop("lineage", None)
    if lineage is None:
        said["written"] = f"{said['written'][:19]}+00:00"
    else:
        said["plan"]["lineage"] = lineage
    text = json.dumps(said, separators=(",", ":"), ensure_ascii=False).encode()
    (folder / "manifest.json").write_bytes(text)
    (folder / "COMMIT").write_text(hashlib.sha256(text).hexdigest() + "\n")


@pytest.fixture
def root(samples: Path, tmp_path: Path) -> Path:
    """A copy of `samples`, to damage."""
    for folder in samples.iterdir():
        target = tmp_path / folder.name
        if folder.is_dir():
            target.mkdir()
            for file in folder.iterdir():
                (target / file.name).write_bytes(file.read_bytes())
        else:
            target.write_bytes(folder.read_bytes())
    return tmp_path


def flip(file: Path, at: int) -> None:
    """Change one bit; counted from the end where `at` is negative."""
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
