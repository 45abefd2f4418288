"""`SpikeGuard`.

Spikes are skipped or undone by all ranks alike, and a run goes on as if it had not seen them.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from easymp import Accelerator, GradScalerKwargs, RefusedError, SettingError, Settings, SpikeGuard, StepError

from ..strategies.models import refuses, under, whole
from .models import heard

LOG = "easymp.parts.spikes"
UPDATES, SAVED, SPIKE, WINDOW = 22, 10, 18, 32
BATCH = 2


class Net(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.drop, self.last = nn.Dropout(drop) if drop else nn.Identity(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.drop(block(x).tanh())
        return self.last(x)


def train(
    folder: str,
    strategy: str | None = None,
    precision: str = "no",
    steps: int = 1,
    policy: str = "skip",
    gone: tuple[int, ...] = (),
    guarded: bool = True,
    stop: int = 0,
    drop: float = 0.3,
) -> dict[str, Any]:
    """`UPDATES` updates, of which `SPIKE` is one, by the data of the last rank.

    The script leaves those in `gone` out.
    """
    options = {"every": 1} if strategy == "local_sgd" else None
    scale = GradScalerKwargs(init_scale=16.0)  # so low that a spike does not overflow
    guards = [SpikeGuard(policy, window=WINDOW, factor=100)] if guarded else []  # type: ignore[arg-type]
    more: dict[str, Any] = {"seed": 0, "cpu": True, "project_dir": folder, "parts": guards}
    more["scaler_options"] = scale if precision == "fp16" else None
    found: dict[str, Any] = {"skipped": [], "scales": []}
    with heard(LOG) as said, under(strategy, options, steps, precision, **more) as acc:
        model = Net(drop)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 40)
        samples = UPDATES * steps * BATCH * acc.num_processes
        x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1))
        loader: Any = DataLoader(TensorDataset(x, torch.arange(len(x)) % 4), batch_size=BATCH, shuffle=True)
        model, optimizer, schedule, loader = acc.prepare(model, optimizer, schedule, loader)
        acc.resume()
        spread = acc._prepared.strategy
        for number, (batch, y) in enumerate(loader, optimizer.updates * steps):
            update = number // steps + 1
            if update in gone:
                continue
            weight = 1.0
            if update == SPIKE and guarded and spread.data_rank == spread.data_size - 1:
                batch, weight = batch + 1000, 1e4
            with acc.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch), y) * weight
                acc.backward(loss)
                acc.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if acc.sync_gradients:
                found["skipped"].append(acc.optimizer_step_was_skipped)
                found["scales"].append(acc.scaler.get_scale())
                if update == SAVED:
                    acc.save_state()
                if update == stop:
                    break
        tensors = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
        found |= {"lr": schedule.get_last_lr(), "updates": optimizer.updates}
        found["tensors"] = [whole(t) for t in tensors]
    return {**found, "said": said, "draw": torch.rand(1).item()}


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a["tensors"], b["tensors"], strict=True))
    assert (a["lr"], a["draw"]) == (b["lr"], b["draw"])


CASES = [
    (None, "no", 2), (None, "fp16", 1), ("ddp", "bf16", 2),
    ("zero1", "no", 1), ("fsdp", "no", 1), ("local_sgd", "no", 1),
]  # fmt: skip


def guard_twice(folder: str, strategy: str | None, precision: str, steps: int) -> list[dict[str, Any]]:
    """With a rollback, and a run that was never given the batches since the checkpoint."""
    gone = tuple(range(SAVED + 1, SPIKE + 1))
    return [train(f"{folder}/{len(left)}", strategy, precision, steps, "rollback", left) for left in ((), gone)]


@pytest.mark.parametrize(("strategy", "precision", "steps"), CASES)
def test_after_a_rollback_the_batches_were_never_seen(
    request: Any, tmp_path: Path, strategy: str | None, precision: str, steps: int
) -> None:
    args = (str(tmp_path), strategy, precision, steps)
    both = request.getfixturevalue("ranks")(guard_twice, *args) if strategy else [guard_twice(*args)]
    for guarded, without in both:
        same(guarded, without)
        assert guarded["updates"] == without["updates"] == UPDATES - (SPIKE - SAVED)
        assert [i for i, skipped in enumerate(guarded["skipped"], 1) if skipped] == [SPIKE]
        assert not any(without["skipped"])
    ((_, line),) = both[0][0]["said"]
    assert line.startswith(f"update {SPIKE}: the gradient norm is ")
    assert "; gone back to " in line and "step-00000010" in line


def skip_all(folder: str, ways: list[tuple[Any, ...]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """With a guard, and a run whose script leaves the update out."""
    found = []
    for i, way in enumerate(ways):
        plain = train(f"{folder}/{i}-plain", *way, gone=(SPIKE,), guarded=False, drop=0.0)
        found.append((train(f"{folder}/{i}", *way, drop=0.0), plain))
    return found


@pytest.mark.slow
def test_all_ranks_skip_a_spike(ranks: Any, tmp_path: Path) -> None:
    ways = [("ddp", "fp16", 2), ("zero1", "no", 1), ("fsdp", "bf16", 2), ("tensor_parallel", "no", 1)]
    for (strategy, *_), *both in zip(ways, *ranks(skip_all, str(tmp_path), ways)):
        for guarded, plain in both:
            assert [i for i, skipped in enumerate(guarded["skipped"], 1) if skipped] == [SPIKE], strategy
            assert len(set(guarded["scales"])) == 1, "a spike does not lower the loss scale"
            same(guarded, plain)
        (said,) = [line for guarded, _ in both for _, line in guarded["said"]]
        assert said.startswith(f"update {SPIKE}: the gradient norm")
        assert "skipped on all ranks. Samples " in said


def one_weight(acc: Accelerator) -> tuple[Any, Any]:
    """A model whose gradient is its input, and an optimizer that hardly moves it."""
    model = nn.Linear(1, 1, bias=False)
    return acc.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9))


def update(acc: Accelerator, model: Any, optimizer: Any, norm: float, loss: float = 0.0) -> None:
    output = model(torch.full((1, 1), norm)).sum()
    acc.backward(output - output.detach().nan_to_num() + loss)
    optimizer.step()
    optimizer.zero_grad()


NOISE = [1.0, 1.2, 0.9, 1.1, 1.0, 1.3, 0.8, 1.1, 1.2, 0.9]
STEADY = NOISE * 2  # its median (the lower one of two) is 1.0, and its deviation 0.1: the limit is about 2.5
RULE = [
    ("a spike", [*STEADY, 3.0, 2.2], {}, [20]),
    ("too early for a limit", [*NOISE, 9.0, *NOISE], {}, []),
    ("not finite, at once", [1.0, float("nan"), 1.2, *STEADY], {}, [1]),
    ("one NaN hides no spike after it", [*STEADY, float("nan"), 1.0, 3.0], {}, [20, 22]),
    ("a lasting rise is accepted", [*STEADY, *[n * 10 for n in STEADY]], {}, [*range(20, 36)]),
    ("a fall is none", [*STEADY, 0.01], {}, []),
    ("most are equal: no limit", [1.0] * 19 + [1.1], {}, []),
    ("few and close together: below twice the median", [*[1.0, 1.001, 1.002, 1.001] * 4, 1.5, 1.0, 2.5], {}, [18]),
    ("a spike of the loss", [1.0, *STEADY], {"losses": [*STEADY, 5.0]}, [20]),
    ("before nonfinite", [*STEADY, float("inf"), 3.0], {"nonfinite": "skip"}, [20, 21]),
]


@pytest.mark.parametrize(("norms", "more", "expected"), [case[1:] for case in RULE], ids=[c[0] for c in RULE])
def test_the_rule(norms: list[float], more: dict[str, Any], expected: list[int]) -> None:
    losses, skipped = more.get("losses", [0.0] * len(norms)), []
    with Accelerator(cpu=True, log_with="none", nonfinite=more.get("nonfinite"), parts=[SpikeGuard(window=32)]) as acc:
        objects = one_weight(acc)
        for i, (norm, loss) in enumerate(zip(norms, losses)):
            update(acc, *objects, norm, loss)
            skipped += [i] * acc.optimizer_step_was_skipped
    assert skipped == expected


def test_a_resumed_run_decides_alike(tmp_path: Path) -> None:
    """The checkpoint keeps the values, without which the spike would come too early for a limit."""
    whole_run = train(str(tmp_path / "whole"))
    train(str(tmp_path / "parts"), stop=SAVED)
    rest = train(str(tmp_path / "parts"))
    assert rest["skipped"] == whole_run["skipped"][SAVED:] and any(rest["skipped"])
    same(rest, whole_run)


def test_a_spike_is_logged_with_its_samples(tmp_path: Path) -> None:
    guard = SpikeGuard(window=32)
    with heard(LOG) as said, Accelerator(cpu=True, project_dir=str(tmp_path), seed=0, parts=[guard]) as acc:
        model = nn.Linear(1, 1)
        x = torch.tensor(NOISE * 4)[:, None]
        loader: Any = DataLoader(TensorDataset(x, torch.arange(40)), batch_size=2, shuffle=True)
        model, optimizer, loader = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), loader)
        for number, (batch, indices) in enumerate(loader):
            loss = model(batch * (1e4 if number == 17 else 1)).square().sum()
            acc.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if number == 17:
                expected = ", ".join(map(str, indices.tolist()))
    assert said[-1][1].endswith(f"skipped on all ranks. Samples 34 to 36 of epoch 0: {expected}")
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    row = next(row for row in rows if row.get("_table") == "spikes" and row["update"] == 18)
    assert (row["answer"], row["begin"], row["end"], row["samples"]) == ("skip", 34, 36, expected)
    assert row["gradient norm"] > row["gradient norm limit"]


@pytest.mark.parametrize("clipped", ["", "encoder", "head", "encoder head"])
@pytest.mark.parametrize(("precision", "bad"), [("fp32", 1), ("bf16-true", 0)])
def test_each_optimizer_is_judged_by_its_own_values(tmp_path: Path, clipped: str, precision: Any, bad: int) -> None:
    """After one backward, and whatever a clip left out: a NaN in gradients of one model is of its optimizer alone."""
    x, guard = torch.ones(2, 4), SpikeGuard(window=32, each_optimizer=True)
    how: Any = {"gradient_accumulation_steps": 2, "mixed_precision": precision, "parts": [guard]}
    with Accelerator(cpu=True, project_dir=str(tmp_path), seed=0, **how) as acc:
        models = {"encoder": nn.Linear(4, 4), "head": nn.Linear(4, 1)}
        given = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models.values()]
        encoder, head, *optimizers = acc.prepare(*models.values(), *given)
        for number in range(24):
            with acc.accumulate():
                loss = head(encoder(x + number % 3).detach()).square().mean() + encoder(x).square().mean()
                acc.backward(loss)
                if number == 23:
                    bias = (encoder, head)[bad].bias
                    bias.grad = torch.full_like(bias, torch.nan)
                for name in clipped.split():
                    acc.clip_grad_norm_({"encoder": encoder, "head": head}[name].parameters(), 1e9)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        assert [optimizer.step_was_skipped for optimizer in optimizers] == [bad == 0, bad == 1]
        assert bias.isfinite().all()
    (row,) = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert row["update"] == 12


def test_returns_to_one_checkpoint_end(tmp_path: Path) -> None:
    guard = SpikeGuard("rollback", window=32)
    with Accelerator(cpu=True, project_dir=str(tmp_path), log_with="none", parts=[guard]) as acc:
        model, optimizer = one_weight(acc)
        call = partial(update, acc, model, optimizer, float("nan"))
        call()  # without a checkpoint it is skipped
        assert acc.optimizer_step_was_skipped and optimizer.updates == 1
        acc.save_state()
        for _ in range(3):
            call()
            assert optimizer.updates == 1
        with pytest.raises(StepError, match=r"has gone back to .*step-00000001 3 times"):
            call()


def test_wrong_arguments_and_calls_are_refused() -> None:
    refuses(SettingError, "policy='skp' is none of", SpikeGuard, "skp")
    for window in (31, 32.0):
        refuses(SettingError, "is not a whole number of at least 32", SpikeGuard, window=window)
    refuses(SettingError, "factor=0", SpikeGuard, factor=0)
    with Accelerator(cpu=True, parts=[SpikeGuard()]) as acc:
        model, optimizer = one_weight(acc)
        model(torch.ones(1, 1)).sum().backward()
        refuses(StepError, "backward() got none since the last step", optimizer.step)
        optimizer.zero_grad()
        acc.backward(model(torch.ones(1, 1)).sum())
        refuses(RefusedError, "step(closure) and guard do not go together", optimizer.step, lambda: 0.0)
        optimizer.step()
    with pytest.raises(RefusedError, match="optimizer_in_backward and guard do not go together"):
        Accelerator(cpu=True, parts=[SpikeGuard()], settings=Settings(optimizer_in_backward=True))
