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

from ..conftest import Ranks as Processes


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def tokens(counts: list[int]) -> list[Tensor]:
    """A batch for each count, of that many items."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, 4, generator=generator) for n in counts]


def one_big_batch(batches: list[Tensor]) -> list[Tensor]:
    model, whole = net(), torch.cat(batches)
    (model(whole).pow(2).sum() / max(len(whole), 1)).backward()
    return [p.grad for p in model.parameters()]


def train(counts: list[list[int]], accumulation: int, precision: str = "fp32") -> list[list[Tensor]]:
    """Gradients at each optimizer step of this rank; `counts` has a list a rank."""
    how: dict[str, Any] = {"mixed_precision": precision, "gradient_accumulation_steps": accumulation}
    with Accelerator(cpu=True, **how) as accelerator:
        model, optimizer = accelerator.prepare(m := net(), torch.optim.SGD(m.parameters(), lr=0.0))
        seen: list[list[Tensor]] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append([p.grad.clone() for p in model.parameters()]))
        every = tokens([n for rank in counts for n in rank])
        each = len(counts[0])
        rank = accelerator.process_index
        for x in every[rank * each : (rank + 1) * each]:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).pow(2).sum(), num_items=len(x))
                optimizer.step()
                optimizer.zero_grad()
        return seen


def expected(counts: list[list[int]], accumulation: int) -> list[list[Tensor]]:
    every = tokens([n for rank in counts for n in rank])
    each = len(counts[0])
    ranks = [every[r * each : (r + 1) * each] for r in range(len(counts))]
    windows = range(0, each, accumulation)
    return [one_big_batch([x for mine in ranks for x in mine[w : w + accumulation]]) for w in windows]


@hypothesis_settings(max_examples=8, deadline=None)
@given(accumulation=st.integers(1, 4), counts=st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_any_counts_and_any_window(accumulation: int, counts: list[int]) -> None:
    counts = counts[: len(counts) // accumulation * accumulation]  # whole windows
    if counts:
        found = train([counts], accumulation)
        torch.testing.assert_close(found, expected([counts], accumulation), rtol=1e-5, atol=1e-6)


def test_two_processes_and_a_loss_scale(ranks: Processes) -> None:
    counts = [[7, 1, 4, 2], [3, 8, 0, 5]]
    for found in ranks(train, counts, 2):
        torch.testing.assert_close(found, expected(counts, 2))
    (found,), (wanted,) = train([[7, 1, 4]], 3, "fp16"), expected([[7, 1, 4]], 3)
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.002)


@pytest.mark.filterwarnings("ignore")
def test_mixing_is_refused() -> None:
    with Accelerator(cpu=True, mixed_precision="fp32", gradient_accumulation_steps=2) as accelerator:
        model, optimizer = accelerator.prepare(m := net(), torch.optim.SGD(m.parameters(), lr=0.1))
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4)).sum(), num_items=2)
            optimizer.step()
        with (
            accelerator.accumulate(model),
            pytest.raises(StepError, match="without num_items in a window that began with it"),
        ):
            accelerator.backward(model(torch.ones(2, 4)).mean())


def test_items_are_not_counted_twice() -> None:
    """Two losses of one micro-batch, each with the same count, would be divided by twice the items."""
    with Accelerator(cpu=True, mixed_precision="fp32", gradient_accumulation_steps=2) as accelerator:
        model = accelerator.prepare(net())
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(2, 4)).sum(), num_items=2)
                with pytest.raises(StepError, match=r"second backward\(\) with num_items in one"):
                    accelerator.backward(model(torch.ones(2, 4)).sum(), num_items=2)
