"""Checkpoints of real trainings, for tests that look at them.

Written once a session and copied by who damages one; small trainings.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset

from easymp import Accelerator
from tests.conftest import Ranks
from tests.strategies.models import make

from ..words import make_accelerator


def train(strategy: str, folder: str, steps: int) -> None:
    """A few updates of the model "tied", then `folder`."""
    acc = Accelerator(strategy=strategy)
    model = make("tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, 20)
    model, optimizer, schedule = acc.prepare(model, optimizer, schedule)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.randn(8, 12, generator=generator)
        acc.backward(nn.functional.cross_entropy(model(x), torch.arange(8) % 5))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    acc.save_state(folder)
    acc.close()


@pytest.fixture(scope="session")
def samples(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``step-00000002`` of one process, ``step-00000003`` of two with fsdp: of the model "tied", on one line."""
    root = tmp_path_factory.mktemp("samples")
    ranks(train, "single", str(root / "step-00000002"), 2, processes=1)
    ranks(train, "fsdp", str(root / "step-00000003"), 3, processes=2)
    rewrite(root / "step-00000003", lineage={**lineage_of(root / "step-00000002"), "parent": "step-00000002"})
    return root


@pytest.fixture
def root(samples: Path, tmp_path: Path) -> Path:
    """A copy of `samples`, to damage."""
    shutil.copytree(samples, tmp_path, dirs_exist_ok=True)
    return tmp_path


def lineage_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_bytes())["plan"]["lineage"]


def rewrite(folder: Path, lineage: dict[str, Any] | None, **fields: Any) -> None:
    """Change what a manifest says; without a `lineage` it is as easymp 0.1 wrote it."""
    manifest = json.loads((folder / "manifest.json").read_bytes()) | fields
    manifest["plan"].pop("lineage", None)
    if lineage is None:
        manifest["written"] = f"{manifest['written'][:19]}+00:00"
    else:
        manifest["plan"]["lineage"] = lineage
    seal(folder, manifest)


def seal(folder: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest, and the COMMIT of its bytes."""
    text = json.dumps(manifest, separators=(",", ":"), ensure_ascii=False).encode()
    (folder / "manifest.json").write_bytes(text)
    (folder / "COMMIT").write_text(hashlib.sha256(text).hexdigest() + "\n")


def flip(file: Path, at: int) -> None:
    """Change one bit; counted from the end where `at` is negative."""
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


class Holder:
    """An object of the user's with any state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


SAMPLES = 40


class Numbered(Dataset[tuple[int, Tensor, Tensor]]):
    """Samples that say which they are."""

    def __init__(self, count: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(count, 12, generator=generator)
        self.y = torch.randint(0, 5, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[int, Tensor, Tensor]:
        return i, self.x[i], self.y[i]


class Small:
    """A training of a few updates: one layer, unless a model is given, and all that a training has."""

    kind: type[Accelerator] = Accelerator

    def __init__(self, folder: Any = None, model: nn.Module | None = None, **options: Any) -> None:
        settings = {"mixed_precision": "no", "seed": 3, "project_dir": folder, "log_with": "none"}
        self.acc = make_accelerator(kind=self.kind, **settings | options)
        model = nn.Linear(12, 5) if model is None else model
        optimizer: Any = torch.optim.AdamW(model.parameters(), 0.1)
        schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        loader = DataLoader(Numbered(), 8, shuffle=True)
        prepared = self.acc.prepare(model, optimizer, schedule, loader)
        self.model, self.optimizer, self.schedule, self.loader = prepared

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.acc.close()

    def step(self, batch: Any = None) -> None:
        first = next(self.model.parameters())
        x = torch.ones(4, first.shape[-1], dtype=first.dtype) if batch is None else batch[1]
        self.acc.backward(self.model(x).square().mean())
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def weight(self) -> Tensor:
        return next(self.model.parameters()).detach().clone()

    def image(self) -> str:
        """All that is live on this rank."""

        def plain(value: Any) -> Any:
            local = value.to_local() if hasattr(value, "to_local") else value
            return (str(local.dtype), local.tolist()) if isinstance(local, Tensor) else value

        parts = (self.model, self.optimizer, self.schedule, self.loader, self.acc.scaler)
        live = [part.state_dict() for part in parts]
        return str(tree_map(plain, [live, self.optimizer.updates, torch.get_rng_state()]))
