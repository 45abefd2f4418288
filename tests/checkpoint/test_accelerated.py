"""A training that Accelerate began goes on here as it would have gone on there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from easymp import Accelerator, CheckpointError

from ..strategies.models import make, whole

pytest.importorskip("accelerate")


def objects() -> tuple[nn.Module, Any, Any]:
    model = nn.Sequential(make("tied"), nn.Dropout(0.2))
    optimizer = torch.optim.AdamW(
        [{"params": list(model[0].blocks.parameters())}, {"params": [model[0].embed.weight], "lr": 0.02}],
        lr=0.01,
    )
    return model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, 20)


class Counter:
    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def steps(acc: Any, model: Any, optimizer: Any, schedule: Any, begin: int, end: int) -> list[float]:
    losses = []
    for i in range(begin, end):
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(i))
        loss = nn.functional.cross_entropy(model(x), torch.arange(8) % 5)
        acc.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def theirs(folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    from accelerate import Accelerator as Theirs
    from accelerate.state import AcceleratorState

    torch.manual_seed(1)
    acc = Theirs(cpu=True)
    model, optimizer, schedule = acc.prepare(*objects())
    counter = Counter()
    acc.register_for_checkpointing(counter)
    steps(acc, model, optimizer, schedule, 0, 3)
    counter.count = 3
    acc.save_state(folder)
    saved = {name: t.detach().clone() for name, t in acc.unwrap_model(model).state_dict().items()}
    losses = steps(acc, model, optimizer, schedule, 3, 6)
    acc.end_training()
    AcceleratorState._reset_state(True)
    return losses, saved


def ours(folder: Path, strategy: str | None) -> tuple[list[float], dict[str, Tensor], int]:
    with Accelerator(cpu=True, strategy=strategy, fused=False, timeout=50) as acc:
        model, optimizer, schedule = objects()
        for p in model.parameters():
            nn.init.zeros_(p)
        model, optimizer, schedule = acc.prepare(model, optimizer, schedule)
        counter = Counter()
        acc.register_for_checkpointing(counter)
        with pytest.raises(CheckpointError, match="are pickles"):
            acc.load_state(folder)
        found = acc.load_state(folder, allow_pickle=True)
        assert found.skipped == () and counter.count == 3 and optimizer.updates == 3
        weights = {name: whole(t) for name, t in model.state_dict().items()}
        return steps(acc, model, optimizer, schedule, 3, 6), weights, int(schedule.state_dict()["last_epoch"])


def test_one_process_goes_on_bit_for_bit(ranks: Any, tmp_path: Path) -> None:
    ((losses, saved),) = ranks(theirs, tmp_path / "a", processes=1)
    ((here, weights, epoch),) = ranks(ours, tmp_path / "a", None, processes=1)
    assert all(torch.equal(weights[name], value) for name, value in saved.items())
    assert here == losses and epoch == 6
    for shards, weights, _ in ranks(ours, tmp_path / "a", "fsdp"):
        assert all(torch.equal(weights[name], value) for name, value in saved.items())
        assert len(shards) == 3


def test_another_order_of_parameters_is_an_error(ranks: Any, tmp_path: Path) -> None:
    ranks(theirs, tmp_path / "a", processes=1)
    with Accelerator(cpu=True) as acc:
        model, _, _ = objects()
        model, _optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters()))
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(
            CheckpointError, match=r"param groups of \[\d+, 1\] parameters, and has \[\d+\] here"
        ):
            acc.load_state(tmp_path / "a", allow_pickle=True)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
