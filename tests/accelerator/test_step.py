"""The step: accumulation, clipping, the loss scale, and every way to call it wrongly."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from easymp import Accelerator, GradientState, StepError

from .models import data, make, train


def plain(batch: int, epochs: int = 2, clip: float | None = None) -> list[torch.Tensor]:
    """The loop by hand, over the same order of samples."""
    model = make()
    with Accelerator(mixed_precision="no", seed=3) as acc:
        loader = acc.prepare(DataLoader(data(), batch_size=batch, shuffle=True))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(epochs):
            for x, _, y in loader:
                nn.functional.cross_entropy(model(x), y).backward()
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in zip(a, b))


def test_the_loop_is_the_loop_by_hand() -> None:
    with Accelerator(mixed_precision="no", seed=3) as acc:
        ours = train(acc, 4, clip=0.5)
    assert same(ours, plain(4, clip=0.5))


def test_an_eval_loop_inside_does_not_disturb_the_window() -> None:
    synced = []
    with Accelerator(mixed_precision="no", gradient_accumulation_steps=4) as acc:
        model, loader, held_out = acc.prepare(
            make(), DataLoader(data(24), batch_size=4), DataLoader(data(8), batch_size=4)
        )
        for _ in loader:
            for i, _ in enumerate(held_out):
                if i == 0:
                    break
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
            with pytest.raises(StepError, match="SGD stepped inside accumulate\\(\\) but was not prepared"):
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
        model = acc.prepare(make())
        norms = []
        for _ in range(2):
            with acc.accumulate(model):
                acc.backward(model(torch.ones(1, 4)).sum())
                norms.append(acc.clip_grad_norm_(model.parameters(), 0.1))
        assert norms[0] is None
        assert norms[1] > 0.1
        clipped = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()]))
        assert clipped == pytest.approx(0.1, rel=1e-4)


def test_an_accelerator_that_is_dropped_is_closed() -> None:
    def train() -> weakref.ref[Accelerator]:
        acc = Accelerator(mixed_precision="auto", gradient_accumulation_steps=2, cpu=True)
        model = nn.Linear(2, 1)
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            with acc.accumulate(model):
                acc.backward(model(torch.ones(1, 2)).sum())
                optimizer.step()
                optimizer.zero_grad()
        return weakref.ref(acc)

    dropped = train()
    gc.collect()
    assert dropped() is None
