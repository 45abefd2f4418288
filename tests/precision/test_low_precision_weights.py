"""Weights that arrive in bf16 or fp16.

Raised to fp32 by "bf16" and "fp16", kept by "bf16-true" and "fp16-true", and said in the plan.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from easymp import Accelerator, Settings, StepError

from ..strategies.models import Of, under

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INPUTS = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
TARGETS = INPUTS[:, :8].sum(1, keepdim=True)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def step(acc: Accelerator, model: nn.Module, optimizer: Any) -> Tensor:
    loss = nn.functional.mse_loss(model(INPUTS), TARGETS)
    acc.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def fine_tuned(precision: str, dtype: torch.dtype, rounds: bool = False) -> tuple[float, float, str]:
    """Share of weights that 50 steps at a learning rate of 1e-5 move, the loss after 200, and the plan."""
    model = net().to(dtype)
    before = [p.detach().float().clone() for p in model.parameters()]
    with Accelerator(mixed_precision=precision, cpu=True, settings=Settings(stochastic_rounding=rounds)) as acc:
        model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-5))
        for _ in range(50):
            step(acc, model, optimizer)
        moved = sum(int((p.detach().float() != b).sum()) for p, b in zip(model.parameters(), before))
        for _ in range(150):
            loss = step(acc, model, optimizer)
        return moved / sum(b.numel() for b in before), float(loss), str(acc)


def test_a_small_learning_rate_moves_the_weights() -> None:
    _, exact, _ = fine_tuned("no", FP32)
    for precision, rounds, share, reason in (
        ("bf16", False, 0.95, "4,225 trainable parameters of Sequential raised from bfloat16"),
        ("bf16-true", False, 0.95, "AdamW steps fp32 masters of 4,225 low-precision parameters"),
        # Each weight moves at random by a spacing of bf16, or not at all: right in the mean, and after 50 steps some
        # have not moved.
        ("bf16-true", True, 0.7, "4,225 low-precision parameters with stochastic rounding"),
    ):
        moved, loss, plan = fine_tuned(precision, BF16, rounds)
        assert moved > share, (precision, rounds)
        assert loss == pytest.approx(exact, rel=0.01), (precision, rounds)
        (line,) = [line for line in plan.splitlines() if line.startswith("weights")]
        assert reason in line


@pytest.mark.reads_hardware
@pytest.mark.parametrize("precision", ["auto", "fp16", "O1", "O2", "fp32", "fp16-true"])
def test_no_precision_loses_small_updates(precision: str) -> None:
    with Accelerator(mixed_precision=precision, cpu=True) as acc:
        model = nn.Linear(1, 1, bias=False).half()
        nn.init.ones_(model.weight)
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
        for _ in range(100):
            acc.backward(-model(torch.ones(1, 1, dtype=model.weight.dtype)).sum())
            optimizer.step()
            optimizer.zero_grad()
        # "auto" is bf16 or fp32, as the processor has it.
        assert model.weight.dtype == (FP16 if acc.mixed_precision in ("no", "fp16-true", "O2") else FP32)
        assert model.weight.item() == pytest.approx(1.01, abs=1e-3)


class Tied(nn.Module):
    """Built in bf16, with tied weights and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.embed(x))
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)


def test_what_is_raised_stays_the_same_object() -> None:
    with Accelerator(mixed_precision="bf16", cpu=True) as acc:
        plain = Tied()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)  # on bf16 parameters, with a state of bf16
        plain(torch.arange(4)).float().square().mean().backward()
        optimizer.step()
        parameters = list(plain.parameters())
        model = acc.prepare(plain)
        assert [p is q for p, q in zip(plain.parameters(), parameters)] == [True] * len(parameters)
        low_precision = {name: p.dtype for name, p in plain.named_parameters() if p.dtype != FP32}
        assert low_precision == {"frozen.weight": BF16, "frozen.bias": BF16}
        assert plain.head.weight is plain.embed.weight
        assert plain.embed.weight.grad.dtype == FP32
        prepared = acc.prepare(optimizer)  # in a later call
        assert {v.dtype for state in prepared.state.values() for v in state.values()} == {FP32}
        acc.backward(model(torch.arange(4)).square().mean())
        prepared.step()
        count = sum(p.numel() for p in parameters if p.requires_grad)
        assert f"{count:,} trainable parameters of Tied" in acc.plan.weights.reason
        plain.frozen.requires_grad_(True)
        acc.backward(model(torch.arange(4)).square().mean())
        with pytest.raises(StepError, match=r"'frozen.weight' trains now, but was frozen .* stayed"):
            prepared.step()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("affine", [True, False])
def test_statistics_go_with_their_weights(precision: str, affine: bool) -> None:
    with Accelerator(mixed_precision=precision, cpu=True) as acc:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=affine)).bfloat16()
        model.append(nn.Sequential(nn.Identity(), nn.BatchNorm1d(4).bfloat16().requires_grad_(False)))
        # Not the last layer: torch's fp16 autocast and frozen bf16 layers do not go together.
        first_two = Of(lambda m, x: m.model[1](m.model[0](x)), model=model)
        prepared, optimizer = acc.prepare(first_two, torch.optim.SGD(model.parameters(), lr=0.1))
        assert [b.dtype for b in model.buffers() if b.is_floating_point()] == [FP32, FP32, BF16, BF16]
        acc.backward(prepared(torch.randn(8, 4)).sum())
        optimizer.step()


STRATEGIES = {"local_sgd": {"every": 1}, "hsdp": {"shard_size": 2}}  # options


def trained(names: list[str]) -> dict[str, dict[str, Any]]:
    return {name: train(name) for name in names}


def train(strategy: str) -> dict[str, Any]:
    with under(strategy, STRATEGIES.get(strategy), 1, "bf16", cpu=True) as acc:
        torch.manual_seed(0)
        model = Tied()
        if strategy == "pipeline":
            layers = (nn.Embedding(16, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 16))
            model = nn.Sequential(*layers).bfloat16()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        model, optimizer = acc.prepare(model, optimizer)
        losses = []
        for _ in range(10):
            loss = nn.functional.cross_entropy(model(torch.arange(16)), torch.arange(16).roll(1))
            acc.backward(loss)
            acc.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
        return {"losses": losses, "dtypes": dtypes, "weights": acc.plan.weights.reason}


@pytest.mark.parametrize(
    ("names", "processes"),
    [
        (["ddp", "fsdp", "pipeline", "zero1", "tensor_parallel", "local_sgd"], 2),
        pytest.param(["hsdp"], 4, marks=pytest.mark.slow),
    ],
)
def test_under_every_strategy(ranks: Any, names: list[str], processes: int) -> None:
    one = train("single")
    for results in ranks(trained, names, processes=processes):
        for name, result in results.items():
            assert result["dtypes"] == {FP32}
            assert "raised from bfloat16" in result["weights"]
            assert result["losses"][-1] < result["losses"][0] - 0.001
            assert name == "pipeline" or result["losses"] == pytest.approx(one["losses"], rel=0.01), name


@pytest.mark.parametrize(
    ("precision", "kind"),
    [("bf16", torch.optim.AdamW), ("bf16-true", torch.optim.AdamW), ("fp16-true", torch.optim.SGD)],
)
def test_a_resumed_run_goes_on_bit_by_bit(tmp_path: Path, precision: str, kind: Any) -> None:
    def run(steps: int, load: bool, save: bool) -> list[Tensor]:
        with Accelerator(mixed_precision=precision, cpu=True, project_dir=tmp_path) as acc:
            model = net().bfloat16()
            model, optimizer = acc.prepare(model, kind(model.parameters(), lr=1e-3))
            if load:
                acc.load_state(str(tmp_path / "half"))
            for _ in range(steps):
                step(acc, model, optimizer)
            if save:
                acc.save_state(str(tmp_path / "half"))
            parameters = [p for group in optimizer.param_groups for p in group["params"]]  # or masters
            return [t.detach().clone() for t in (*model.parameters(), *parameters)]

    run(5, False, True)
    assert all(map(torch.equal, run(10, False, False), run(5, True, False)))


@pytest.mark.parametrize("thawed", ["before", "after"])
def test_a_frozen_layer_that_is_added_to_train_later_is_refused(thawed: str) -> None:
    with Accelerator(mixed_precision="bf16", cpu=True) as acc:
        model = net().bfloat16()
        model[0].requires_grad_(False)
        model, optimizer = acc.prepare(model, torch.optim.SGD(model[2].parameters(), lr=1e-4))

        def train() -> None:
            model[0].requires_grad_(thawed == "before")
            optimizer.add_param_group({"params": model[0].parameters()})
            model[0].requires_grad_(True)
            step(acc, model, optimizer)

        with pytest.raises(StepError, match=r"'0.weight' trains now, but was .* in no optimizer .* stayed"):
            train()
        assert len(optimizer.param_groups) == (1 if thawed == "before" else 2)
