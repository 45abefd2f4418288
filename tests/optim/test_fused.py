"""Fused steps: the same numbers and the same state as the plain ones, and nobody's choice overridden."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from easymp.base.accumulation import StepClock
from easymp.optim import PreparedOptimizer, fuse
from easymp.precision import Scaler

KINDS = [
    (torch.optim.Adam, {"lr": 0.01}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.AdamW, {"lr": torch.tensor(0.01)}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (
        torch.optim.SGD,
        {"lr": 0.001, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "maximize": True},
    ),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))


def prepared(optimizer: torch.optim.Optimizer) -> PreparedOptimizer:
    return PreparedOptimizer(optimizer, StepClock(), Scaler(enabled=False))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 6, generator=generator)).pow(2).sum().backward()
        optimizer.step()


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def plain_state(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Tensor]]:
    return optimizer.state_dict()["state"]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_the_same_numbers(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    ours, theirs = net(), net()
    fused, plain = kind(ours.parameters(), **options), kind(theirs.parameters(), **options)
    assert fuse(fused) is None
    assert all(group["fused"] for group in fused.param_groups)
    train(ours, fused, 5)
    train(theirs, plain, 5)
    close(ours.state_dict(), theirs.state_dict())
    close(plain_state(fused), plain_state(plain))


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("to_fused", [True, False])
def test_a_state_goes_from_one_to_the_other(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], to_fused: bool
) -> None:
    """Numbers go on as if nothing had happened, and each keeps the step it has."""
    model = net()
    first = kind(model.parameters(), **copy.deepcopy(options))
    if not to_fused:
        fuse(first)
    train(model, first, 3)
    state, weights = copy.deepcopy(first.state_dict()), copy.deepcopy(model.state_dict())
    train(model, first, 3, seed=2)

    again = net()
    again.load_state_dict(weights)
    raw = kind(again.parameters(), **copy.deepcopy(options))
    if to_fused:
        assert fuse(raw) is None
    second = prepared(raw)
    second.load_state_dict(state)
    assert all(bool(group["fused"]) == to_fused for group in second.param_groups)
    train(again, second, 3, seed=2)
    close(again.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"fused": False}, "chosen by the caller"),
        ({"fused": True}, "chosen by the caller"),
        ({"foreach": True}, "chosen by the caller"),
        ({"foreach": False}, "chosen by the caller"),
        ({"differentiable": True}, "differentiable or capturable"),
    ],
)
def test_an_explicit_choice_is_left_alone(options: dict[str, Any], why: str) -> None:
    optimizer = torch.optim.Adam(net().parameters(), **options)
    before = copy.deepcopy(optimizer.state_dict()), dict(optimizer.defaults)
    assert why in str(fuse(optimizer))
    assert (optimizer.state_dict(), optimizer.defaults) == before


def test_one_groups_choice_is_the_choice_of_all() -> None:
    first, _, last = net()
    optimizer = torch.optim.AdamW(
        [{"params": first.parameters()}, {"params": last.parameters(), "foreach": True}]
    )
    assert "chosen by the caller" in str(fuse(optimizer))
    assert [group["fused"] for group in optimizer.param_groups] == [None, None]


def test_what_torch_has_no_fused_step_for() -> None:
    class Mine(torch.optim.Adam):
        pass

    assert fuse(Mine(net().parameters())) == "torch has no fused step for Mine"
    assert fuse(torch.optim.RMSprop(net().parameters())) == "torch has no fused step for RMSprop"
    assert "does not take torch.complex64 on cpu" in str(
        fuse(torch.optim.Adam([nn.Parameter(torch.ones(2, dtype=torch.complex64))]))
    )
    with_meta = torch.optim.Adam([nn.Parameter(torch.ones(2, device="meta"))])
    assert "on meta" in str(fuse(with_meta))


def test_a_parameter_with_gaps_takes_the_plain_step() -> None:
    """torch 2.13's fused steps on a CPU write into the gaps."""
    gaps = nn.Parameter(torch.ones(4, 8)[:, :5])
    assert "has gaps in memory" in str(fuse(torch.optim.AdamW([gaps])))
    assert fuse(torch.optim.AdamW([nn.Parameter(torch.ones(4, 8).t())])) is None


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize(
    "table", [nn.Embedding(5, 2, sparse=True), nn.EmbeddingBag(5, 2, mode="sum", sparse=True)]
)
def test_sparse_gradients_take_the_plain_step(kind: type[torch.optim.Optimizer], table: nn.Module) -> None:
    model = nn.ModuleDict({"table": table, "head": nn.Linear(2, 1)})
    optimizer = kind(model.parameters(), lr=0.1)
    assert "does not take the sparse gradients of 'table'" in str(fuse(optimizer, [model]))
    model["head"](table(torch.tensor([[1, 2]]))).sum().backward()
    optimizer.step()
    # The rest of the model may have an optimizer of its own, and dense gradients are fine.
    assert fuse(kind(model["head"].parameters(), lr=0.1), [model]) is None
    assert fuse(kind(nn.Embedding(5, 2).parameters(), lr=0.1), [nn.Embedding(5, 2)]) is None


def test_a_gradient_that_comes_later_than_the_others() -> None:
    """A branch that the first batches do not take: torch's fused SGD alone fails on it."""

    def run(fused: bool) -> list[Tensor]:
        a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([a, b], lr=0.1, momentum=0.9)
        if fused:
            assert fuse(optimizer) is None
        for step in range(3):
            a.grad = torch.full((2,), 1.0 + step)
            b.grad = torch.full((2,), 2.0) if step else None
            optimizer.step()
        return [a.data, b.data]

    close(run(True), run(False))


def test_a_parameter_group_that_comes_later() -> None:
    def run(fused: bool) -> list[Tensor]:
        a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        raw = torch.optim.SGD([a], lr=0.1, momentum=0.9)
        if fused:
            fuse(raw)
        optimizer = prepared(raw)
        for step in range(3):
            if step == 1:
                optimizer.add_param_group({"params": [b], "lr": 0.5})
            a.grad, b.grad = torch.ones(2), torch.ones(2) if step else None
            optimizer.step()
        return [a.data, b.data]

    close(run(True), run(False))


def test_a_state_from_before_a_parameter_had_gradients() -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    plain = torch.optim.SGD([a, b], lr=0.1, momentum=0.9)
    a.grad = torch.ones(2)
    plain.step()
    raw = torch.optim.SGD([a, b], lr=0.1, momentum=0.9)
    fuse(raw)
    optimizer = prepared(raw)
    optimizer.load_state_dict(plain.state_dict())
    b.grad = torch.ones(2)
    optimizer.step()
    close(b.data, torch.full((2,), 0.9))


def test_dampening_keeps_the_plain_step() -> None:
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    assert "dampening" in str(fuse(optimizer))
    assert not optimizer.state
    assert (
        fuse(torch.optim.SGD(net().parameters(), lr=0.1, dampening=0.5)) is None
    )  # without momentum it means nothing


def test_frozen_parameters_get_no_state() -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert fuse(optimizer) is None
    assert set(optimizer.state) == set(model[2].parameters())


def test_fusing_twice_changes_nothing() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fuse(optimizer)
    train(model, optimizer, 2)
    before = copy.deepcopy(optimizer.state_dict())
    fuse(optimizer)
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


def test_an_optimizer_that_has_stepped_goes_on() -> None:
    ours, theirs = net(), net()
    fused, plain = torch.optim.Adam(ours.parameters()), torch.optim.Adam(theirs.parameters())
    for model, optimizer in ((ours, fused), (theirs, plain)):
        train(model, optimizer, 2)
    assert fuse(fused) is None
    for model, optimizer in ((ours, fused), (theirs, plain)):
        train(model, optimizer, 2, seed=3)
    close(ours.state_dict(), theirs.state_dict())
    assert plain_state(fused)[0]["step"] == 4


def test_an_empty_group() -> None:
    """As `[{"params": decayed}, {"params": others}]` leaves, where nothing is decayed."""
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([{"params": []}, {"params": [p]}])
    p.grad = torch.ones(2)
    optimizer.step()
    assert fuse(optimizer) is None
    optimizer.step()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (torch.optim.SGD, torch.bfloat16),
        (torch.optim.SGD, torch.float16),
        (torch.optim.AdamW, torch.bfloat16),
    ],
)
def test_low_precision_steps_are_those_of_the_plain_step(
    kind: type[torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    """torch 2.13's fused SGD is not, on CPUs."""
    found = []
    for wanted in (True, False):
        generator = torch.Generator().manual_seed(0)
        p = nn.Parameter(torch.randn(70, generator=generator).to(dtype))
        optimizer = kind([p], lr=0.05, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
        if wanted:
            fuse(optimizer)
        for _ in range(3):
            p.grad = torch.randn(70, generator=generator).to(dtype)
            optimizer.step()
        found.append(p.detach())
    torch.testing.assert_close(*found, rtol=0.02, atol=0.02)
