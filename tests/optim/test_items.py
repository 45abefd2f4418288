"""A loss summed over items: for any counts, the gradient is that of one big batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn

from easymp import Accelerator, StepError


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def tokens(counts: list[int]) -> list[Tensor]:
    """A batch for each count, of that many items."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, 4, generator=generator) for n in counts]


def expected(counts: list[int], accumulation: int) -> list[list[Tensor]]:
    """Gradients of one big batch a window."""
    found = []
    for begin in range(0, len(counts), accumulation):
        model, batch = net(), torch.cat(tokens(counts)[begin : begin + accumulation])
        (model(batch).pow(2).sum() / max(len(batch), 1)).backward()
        found.append([p.grad for p in model.parameters()])
    return found


def train(counts: list[int], accumulation: int, precision: str = "fp32") -> list[list[Tensor]]:
    """Gradients at each optimizer step."""
    how: dict[str, Any] = {"mixed_precision": precision, "gradient_accumulation_steps": accumulation}
    with Accelerator(cpu=True, **how) as accelerator:
        model, optimizer = accelerator.prepare(m := net(), torch.optim.SGD(m.parameters(), lr=0.0))
        seen: list[list[Tensor]] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append([p.grad.clone() for p in model.parameters()]))
        for x in tokens(counts):
            with accelerator.accumulate(model):
                accelerator.backward(model(x).pow(2).sum(), num_items=len(x))
                optimizer.step()
                optimizer.zero_grad()
        return seen


@hypothesis_settings(max_examples=8, deadline=None)
@given(accumulation=st.integers(1, 4), counts=st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_any_counts_and_any_window(accumulation: int, counts: list[int]) -> None:
    counts = counts[: len(counts) // accumulation * accumulation]  # whole windows
    if counts:
        found = train(counts, accumulation)
        torch.testing.assert_close(found, expected(counts, accumulation), rtol=1e-5, atol=1e-6)


def test_a_loss_scale() -> None:
    counts = [7, 1, 4]
    torch.testing.assert_close(train(counts, 3, "fp16"), expected(counts, 3), rtol=0.02, atol=0.002)


@pytest.mark.parametrize(
    ("again", "words"),
    [
        (False, "without num_items in a window that began with it"),
        (True, r"second backward\(\) with num_items in one"),  # which would be divided by twice the items
    ],
)
def test_mixing_and_counting_twice_are_refused(again: bool, words: str) -> None:
    with Accelerator(cpu=True, mixed_precision="fp32", gradient_accumulation_steps=2) as accelerator:
        model = accelerator.prepare(net())
        loss = lambda: model(torch.ones(2, 4)).sum()  # noqa: E731
        with accelerator.accumulate(model):
            accelerator.backward(loss(), num_items=2)
            if again:
                with pytest.raises(StepError, match=words):
                    accelerator.backward(loss(), num_items=2)
        with accelerator.accumulate(model):
            if again:
                accelerator.backward(loss(), num_items=2)
            else:
                with pytest.raises(StepError, match=words):
                    accelerator.backward(loss())
