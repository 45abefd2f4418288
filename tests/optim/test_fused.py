"""Fused steps: the same numbers and the same state as the plain ones, and the user's choices kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from easymp.optim import fuse


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("kind", "table"),
    [
        (torch.optim.SGD, nn.Embedding(5, 2, sparse=True)),
        (torch.optim.Adagrad, nn.EmbeddingBag(5, 2, mode="sum", sparse=True)),
    ],
)
def test_sparse_gradients_take_the_plain_step(kind: Any, table: nn.Module) -> None:
    model = nn.ModuleDict({"table": table, "head": nn.Linear(2, 1)})
    optimizer = kind(model.parameters(), lr=0.1)
    assert "does not take the sparse gradients of 'table'" in str(fuse(optimizer, [model]))
    model["head"](table(torch.tensor([[1, 2]]))).sum().backward()
    optimizer.step()
    assert fuse(kind(model["head"].parameters(), lr=0.1), [model]) is None  # the rest of the model


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
    ("kind", "dtype"), [(torch.optim.SGD, torch.float16), (torch.optim.AdamW, torch.bfloat16)]
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
