"""Fused steps: the same numbers and the same state as the plain ones, and the user's choices kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from easymp.optim import fuse

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


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 6, generator=generator)).pow(2).sum().backward()
        optimizer.step()


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_the_same_numbers(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    ours, theirs = net(), net()
    fused, plain = kind(ours.parameters(), **options), kind(theirs.parameters(), **options)
    assert fuse(fused) is None
    assert all(group["fused"] for group in fused.param_groups)
    train(ours, fused, 5)
    train(theirs, plain, 5)
    close(ours.state_dict(), theirs.state_dict())
    close(fused.state_dict()["state"], plain.state_dict()["state"])


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


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (torch.optim.SGD, torch.bfloat16),
        (torch.optim.SGD, torch.float16),
        (torch.optim.AdamW, torch.bfloat16),
    ],
)
def test_low_precision_steps_are_those_of_the_plain_step(kind, dtype):
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
