"""auto on a CPU: the first training step is timed once, for all models and ranks, and leaves no trace."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from easymp import AutocastKwargs, Choice
from easymp.distributed import Ranks, World, read_ranks
from easymp.precision import Measured, measured

from ..conftest import Ranks as Processes
from ..strategies.models import Of

CPU = torch.device("cpu")
ALONE = World(Ranks(), CPU)


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says what the clock shall find: ``outcome(0.5)`` is bf16 in half the time. The model still runs, a few times."""

    def set_ratio(ratio: float) -> None:
        real = measured.time_pairs

        def fixed(*args: Any) -> Any:
            found = real(*args)
            return found if isinstance(found, str) else (ratio, found[1])

        monkeypatch.setattr(measured, "PAIRS", (2, 3))
        monkeypatch.setattr(measured, "BUDGET", 1e9)  # however busy this machine is
        monkeypatch.setattr(measured, "time_pairs", fixed)

    return set_ratio


def undecided(model: nn.Module, **options: Any) -> tuple[Measured, nn.Module, list[Choice[str]]]:
    said: list[Choice[str]] = []
    policy = Measured(AutocastKwargs(), ALONE, decided=said.append, **options)
    return policy, policy.forward(policy.convert(model), CPU), said


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("ratio", "name", "reason"),
    [
        (0.5, "bf16", "bf16 2 times as fast as fp32"),
        (2.0, "fp32", "fp32 2 times as fast as bf16"),
        (0.97, "fp32", "bf16 takes 0.97 times fp32's time"),
    ],
)
def test_the_faster_one_stays_and_the_figure_is_the_reason(outcome, ratio, name, reason):
    outcome(ratio)
    model = net()
    policy, called, said = undecided(model)
    assert policy.name == "auto"
    seen: list[torch.dtype] = []
    y = called(torch.randn(4, 4))
    assert said == [policy.choice] and policy.name == name
    assert reason in said[0].reason and "median of 3 pairs" in said[0].reason
    assert y.dtype == torch.float32
    model[4].register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    called(torch.randn(4, 4))
    assert seen == [{"bf16": torch.bfloat16, "fp32": torch.float32}[name]]
    assert policy.compute == seen[0]


def test_the_step_leaves_no_trace(outcome: Any) -> None:
    outcome(2.0)

    def step(watched: bool) -> list[Any]:
        model = net()
        called = undecided(model)[1] if watched else model
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        x = torch.randn(4, 4, requires_grad=True)
        called(x).sum().backward()
        draws = [torch.rand(1), random.random(), numpy.random.rand()]
        return [dict(model.state_dict()), [p.grad for p in model.parameters()], x.grad, x.detach(), *draws]

    plain, probed = step(False), step(True)
    assert plain[0]["1.num_batches_tracked"] == 1
    torch.testing.assert_close(probed, plain, rtol=0, atol=0)


def test_a_model_that_does_not_run_in_bf16_runs_in_fp32() -> None:
    def call(m: nn.Module, x: Tensor) -> Tensor:
        y = m.layer(x)
        return y * float(y.detach().numpy().sum())  # in fp32 only, as much code that meets NumPy

    model = Of(call, layer=nn.Linear(3, 3))
    policy, called, said = undecided(model)
    called(torch.ones(2, 3)).sum().backward()
    assert policy.name == "fp32"
    assert said[0].reason.startswith("this model does not run in bf16 (TypeError: ")
    assert model.layer.weight.grad is not None


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(128, 128))), "bf16"),
        (nn.Linear(1024, 127), "fp32"),
        (nn.Conv2d(16, 128, 3), "bf16"),  # 16 × 3 × 3 in, 128 out
        (nn.Conv2d(14, 128, 3), "fp32"),
        (nn.Embedding(5000, 512), "fp32"),  # a look-up, not a product
        (nn.ReLU(), "fp32"),
    ],
    ids=str,
)
def test_without_a_measurement_the_widest_layer_decides(model, name, monkeypatch):
    monkeypatch.setattr(measured, "time_pairs", lambda *_: pytest.fail("measured"))
    policy, called, said = undecided(model, measure=False)
    assert policy.name == name and len(said) == 1 and "not measured" in said[0].reason
    assert (called is model) == (name == "fp32")


def decide() -> list[tuple[str, str, bool, float]]:
    """A rank's view where bf16 is fast on rank 0, then on rank 1: decision, reason, whether it measured, and the next random number."""
    world, found = World(read_ranks(), CPU, timeout=20), []
    try:
        for fast_on in (0, 1):
            measuring = []

            def fake(*_: Any, fast_on: int = fast_on, measuring: list[bool] = measuring) -> tuple[float, int]:
                measuring.append(True)
                return (0.5 if world.rank == fast_on else 2.0), 3

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(measured, "time_pairs", fake)
                policy = Measured(AutocastKwargs(), world)
                torch.manual_seed(5)
                policy.forward(nn.Linear(4, 4), CPU)(torch.ones(2, 4))
            assert policy.choice is not None
            found.append((policy.choice.value, policy.choice.reason, bool(measuring), torch.rand(1).item()))
        return found
    finally:
        world.close()


def test_rank_0_decides_for_all(ranks: Processes) -> None:
    first, second = ranks(decide)
    assert first == second
    assert [(value, measuring) for value, _, measuring, _ in first] == [("bf16", True), ("fp32", True)]


def fail_on_both() -> None:
    world = World(read_ranks(), CPU, timeout=20)
    try:
        Measured(AutocastKwargs(), world).forward(nn.Linear(4, 4), CPU)(torch.ones(2, 5))
    finally:
        world.close()


def test_a_wrong_batch_is_an_error_on_every_rank_and_no_hang(ranks: Processes) -> None:
    for failure in ranks.fails(fail_on_both):
        assert "shapes cannot be multiplied" in failure.message
