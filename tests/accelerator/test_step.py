"""The step: accumulation, clipping, and every way to call it wrongly."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from easymp import Accelerator, StepError
from easymp.compat.accelerate import GradientState

from .models import data, make


def test_an_eval_loop_inside_does_not_disturb_the_window() -> None:
    synced = []
    with Accelerator(mixed_precision="no", gradient_accumulation_steps=4) as acc:
        loaders = [DataLoader(data(n), batch_size=4) for n in (24, 8)]
        model, loader, held_out = acc.prepare(make(), *loaders)
        for _ in loader:
            next(iter(held_out))
            list(held_out)
            with acc.accumulate(model):
                synced.append(acc.sync_gradients)
            assert GradientState().active_dataloader is loader
        assert acc.total_updates(loader, epochs=2) == 4
    assert synced == [False, False, False, True, False, True]


def test_an_optimizer_that_was_not_prepared() -> None:
    with Accelerator(mixed_precision="no", gradient_accumulation_steps=4) as acc:
        model = make()
        optimizer = torch.optim.SGD([{"params": []}, {"params": list(model.parameters())}], 0.1)
        model = acc.prepare(model)
        with acc.accumulate(model):
            acc.backward(model(torch.ones(1, 4)).sum())
            with pytest.raises(StepError, match=r"SGD stepped inside accumulate\(\) but was not prepared"):
                optimizer.step()
    optimizer.step()  # afterwards it is the user's own again


def test_a_loss_that_is_none() -> None:
    with Accelerator(mixed_precision="no") as acc:
        out = acc.prepare(make())(torch.ones(3, 4))
        for loss, words in (
            (out.sum().item(), "the loss as a tensor, not float"),
            (out.sum().detach(), "a loss without a graph"),
            (out, r"a loss of shape \(3, 2\): reduce it"),
        ):
            with pytest.raises(StepError, match=words):
                acc.backward(loss)


def test_clipping_acts_once_a_window() -> None:
    with Accelerator(mixed_precision="no", gradient_accumulation_steps=2) as acc:
        model, norms = acc.prepare(make()), []
        for _ in range(2):
            with acc.accumulate(model):
                acc.backward(model(torch.ones(1, 4)).sum())
                norms.append(acc.clip_grad_norm_(model.parameters(), 0.1))
        assert norms[0] is None and norms[1] > 0.1
        assert nn.utils.get_total_norm([p.grad for p in model.parameters()]) == pytest.approx(0.1, rel=1e-4)


def test_an_accelerator_that_is_dropped_is_closed() -> None:
    def train() -> weakref.ref[Accelerator]:
        acc = Accelerator(mixed_precision="auto", gradient_accumulation_steps=2, cpu=True)
        model, optimizer = acc.prepare(given := make(), torch.optim.SGD(given.parameters(), lr=0.1))
        for _ in range(2):
            with acc.accumulate(model):
                acc.backward(model(torch.ones(1, 4)).sum())
                optimizer.step()
        return weakref.ref(acc)

    dropped = train()
    gc.collect()
    assert dropped() is None and gc.isenabled()


@pytest.mark.parametrize("steps", [1, 2])
def test_num_items_may_be_weights_and_no_nonsense(steps: int) -> None:
    x, weights = torch.arange(4.0)[:, None] + 1, torch.tensor([0.1, 0.2, 0.0, 0.0])  # none in the second half
    with Accelerator(cpu=True, mixed_precision="fp32", gradient_accumulation_steps=steps) as acc:
        model = acc.prepare(nn.Linear(1, 1, bias=False))
        for part, its in zip(x.chunk(steps), weights.chunk(steps)):
            with acc.accumulate(model):
                acc.backward((model(part)[:, 0] * its).sum(), num_items=its.sum())
        torch.testing.assert_close(model.weight.grad, (x[:, 0] * weights).sum().view(1, 1) / weights.sum())
        model.zero_grad()
        for part in x.chunk(steps):
            with acc.accumulate(model):
                acc.backward((model(part) * 0).sum(), num_items=0)
        assert model.weight.grad.item() == 0.0
        for wrong in (-3, float("nan"), float("inf"), "4", torch.tensor(-1), torch.tensor([True, False])):
            with acc.accumulate(model), pytest.raises(StepError, match="as num_items: pass how many"):
                acc.backward(model(x).sum(), num_items=wrong)  # type: ignore[arg-type]


def test_the_number_of_micro_batches_changes_between_updates_only() -> None:
    with Accelerator(cpu=True, mixed_precision="fp32", gradient_accumulation_steps=4) as acc:
        model = acc.prepare(nn.Linear(1, 1, bias=False))
        acc.gradient_accumulation_steps = 2
        for _ in range(2):
            with acc.accumulate(model):
                acc.backward(model(torch.ones(1, 1)).sum())
            if not acc.sync_gradients:
                with pytest.raises(StepError, match="= 8 after micro-step 1 of 2"):
                    acc.gradient_accumulation_steps = 8
        assert model.weight.grad.item() == 1.0
        acc.gradient_accumulation_steps = 8
