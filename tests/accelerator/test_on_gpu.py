"""On a GPU: the loop of the README in each precision, a resume that is exact, and steps that wait for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from easymp import Accelerator

pytestmark = pytest.mark.gpu
PRECISIONS = ["no", "bf16", "fp16", "fp8"]


class Training:
    """A model of a few layers (sizes that fp8 takes, too), AdamW, a schedule, and a shuffled loader."""

    def __init__(self, acc: Accelerator) -> None:
        self.acc = acc
        net = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
        x = torch.randn(256, 32, generator=torch.Generator().manual_seed(0))
        loader = DataLoader(TensorDataset(x, x[:, :16].sin()), batch_size=16, shuffle=True)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=64)
        self.model, self.optimizer, self.loader, self.schedule = acc.prepare(net, optimizer, loader, schedule)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(self.model(inputs), targets, reduction="sum")
        self.acc.backward(loss, num_items=targets.numel())
        self.acc.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if not self.acc.scaler.enabled:  # else it asks whether the step was skipped, and waits to hear
            self.schedule.step()
        self.optimizer.zero_grad()
        self.acc.log({"loss": loss})
        return loss.detach()

    def epoch(self) -> list[Tensor]:
        return [self.step(*batch) for batch in self.loader]

    def state(self) -> list[Tensor]:
        values = [value for state in self.optimizer.state.values() for value in state.values()]
        moments = [value for value in values if isinstance(value, Tensor)]
        return [t.detach().cpu().clone() for t in (*self.model.state_dict().values(), *moments)]


def begun(folder: Path, precision: str) -> Accelerator:
    if precision == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs an NVIDIA GPU with fp8 Tensor Cores (sm_89 or newer)")
    return Accelerator(mixed_precision=precision, seed=0, project_dir=folder)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_learns_and_a_resume_is_exact(tmp_path: Path, precision: str) -> None:
    with begun(tmp_path, precision) as acc:
        training = Training(acc)
        first = training.epoch()
        saved = acc.save_state(async_=True)
        wanted = training.epoch(), training.state()
        assert float(torch.stack(wanted[0]).mean()) < 0.9 * float(torch.stack(first).mean())
        assert all(t.is_cuda for t in (*training.model.parameters(), *first))
    with begun(tmp_path, precision) as acc:
        training = Training(acc)
        acc.load_state(saved)
        found = training.epoch(), training.state()
        assert torch.equal(torch.stack(found[0]), torch.stack(wanted[0]))
        assert all(torch.equal(a, b) for a, b in zip(found[1], wanted[1], strict=True))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_waits_for_nothing(tmp_path: Path, precision: str) -> None:
    """Loader, forward, backward by items, clipping, loss scale, step, schedule and log.

    The first pass may, which takes memory.
    """
    with begun(tmp_path, precision) as acc:
        training = Training(acc)
        training.epoch()
        torch.cuda.set_sync_debug_mode("error")
        try:
            training.epoch()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_profile_tells_of_the_device(tmp_path: Path) -> None:
    with begun(tmp_path, "bf16") as acc:
        training = Training(acc)
        with acc.profile() as profile:
            training.epoch()
        assert profile.breakdown.device == "cuda:0" and profile.breakdown.idle and profile.breakdown.peak
        assert {"forward", "backward", "optimizer"} <= profile.breakdown.time.keys()
        assert "allocated on cuda:0" in profile.summary() and profile.traces[0].exists()


def test_an_optimizer_that_has_stepped_before_goes_on(tmp_path: Path) -> None:
    net = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with begun(tmp_path, "no") as acc:
        net, optimizer = acc.prepare(net, optimizer)
        acc.backward(net(torch.ones(1, 4, device=acc.device)).sum())
        optimizer.step()
        assert all(state["exp_avg"].is_cuda for state in optimizer.state.values())
