"""Gradients are right under every strategy, or refused before they are used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import easymp
from easymp import (
    Accelerator,
    DataLoaderConfiguration,
    GradScalerKwargs,
    PrepareError,
    Settings,
    StepError,
)

from ..strategies.models import make, refuses, under, update


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Tower(Critic):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Sequential(*self.blocks)(x) * self.scale

    @easymp.forward_method
    def score(self, h: torch.Tensor) -> torch.Tensor:
        return self.head(h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(self.embed(x))

    def around(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self(x)


# -- methods that compute as forward does ------------------------------------------------------------------------------

NAMES = ("embed", "around")
# Ways to compute outputs, and the number of micro-batches of an update.
WAYS: list[tuple[Any, int]] = [
    (lambda m, x: m.forward(x), 1),
    (lambda m, x: m.score(m.embed(x)), 1),
    (lambda m, x: m.score(m.embed(x) * m.embed(-x)) + m(x) + m.around(x), 2),
]


def trained(strategy: str | None, way: Any, steps: int) -> dict[str, torch.Tensor]:
    """Rank 0's parameters after four updates by outputs that are computed by `way`."""
    with under(strategy, None, steps) as acc:
        model = make(Tower)
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), forward_methods=NAMES)
        spread = acc._prepared.strategy
        generator = torch.Generator().manual_seed(1)
        for _ in range(4 * steps):
            x = torch.randn(8, 8, generator=generator).chunk(spread.data_size)[spread.data_rank]
            with acc.accumulate(model):
                update(acc, optimizer, (out := way(model, x)).square().mean() + out.mean())
        acc.wait_for_everyone()
        return {name: value.clone() for name, value in acc.weights(model)}


def by_all_ways(strategy: str | None) -> list[dict[str, torch.Tensor]]:
    return [trained(strategy, way, steps) for way, steps in WAYS]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "tensor_parallel"])
def test_methods_train_as_forward_does(ranks, strategy: str) -> None:
    torch.testing.assert_close(ranks(by_all_ways, strategy)[0], by_all_ways(None), rtol=0, atol=1e-6)


def test_forward_methods_are_methods_of_a_model() -> None:
    with Accelerator(mixed_precision="no", cpu=True) as acc:
        for names, words in {
            ("embedd",): "has no method 'embedd', did you mean 'embed'",
            ("train",): "has no method 'train'",
            "head": "'head' is a submodule: name a method of the model that calls it",
        }.items():
            with pytest.raises(PrepareError, match=words):
                acc.prepare(Tower(), forward_methods=names)
        with pytest.raises(PrepareError, match="no new model has no method 'embed'"):
            acc.prepare(forward_methods="embed")
        first, _ = acc.prepare(Tower(), Critic(), forward_methods="embed")
        assert first.embed(torch.ones(1, 8)).shape == (1, 8)


# -- what cannot train -------------------------------------------------------------------------------------------------


@pytest.mark.on_ranks(2)
def test_what_would_have_wrong_gradients_is_refused() -> None:
    x = torch.ones(2, 8)
    for strategy in ("ddp", "zero1", "fsdp"):
        with under(strategy) as acc:
            model = acc.prepare(Tower())
            refuses(StepError, "forward_methods=('", lambda m=model, acc=acc: acc.backward(m.embed(x).sum()))
        with under(strategy) as acc:
            model = acc.prepare(Tower(), forward_methods=NAMES)
            refuses(StepError, "forward_methods=('", lambda m=model, acc=acc: acc.backward(m.head(x).sum()))
    with under("ddp") as acc:
        frozen = Critic()
        frozen.head.requires_grad_(False)
        model = acc.prepare(frozen)
        model.head.requires_grad_(True)
        trained_later = "'head.weight' had requires_grad=False when the model was prepared"
        refuses(StepError, trained_later, acc.backward, model(x).sum())
    with under("ddp", {"static_graph": True}) as acc:
        leaf = x.clone().requires_grad_()
        output = acc.prepare(Critic())(leaf).sum()
        together = "create_graph=True and static_graph=True do not go together"
        refuses(StepError, together, torch.autograd.grad, output, leaf, create_graph=True)


# -- what sharded ranks must do together -------------------------------------------------------------------------------


def out_of_batches(calls: bool, leave: int) -> int:
    config = DataLoaderConfiguration(even_batches=False)
    how: Any = {"strategy": "fsdp", "dataloader_config": config, "settings": Settings(timeout=30)}
    with Accelerator(mixed_precision="no", **how) as acc:
        data = TensorDataset(torch.randn(12, 8))
        model, loader = acc.prepare(Critic(), DataLoader(data, batch_size=4))
        seen = 0
        for (x,) in loader:
            if calls:
                acc.backward(model(x).mean())
            seen += 1
            if seen == leave:
                break
        return seen


def test_sharded_ranks_say_that_one_is_out_of_batches(ranks) -> None:
    for failure in ranks.fails(out_of_batches, True, 0):
        assert failure.type == "BatchError"
        assert "the ranks have 2, 1 batches in this pass" in failure.message
    assert ranks(out_of_batches, True, 1) == [1, 1]
    assert ranks(out_of_batches, False, 0) == [2, 1]


def frozen_late(both: bool) -> float:
    with Accelerator(mixed_precision="no", strategy="fsdp", settings=Settings(timeout=2)) as acc:
        model = acc.prepare(Critic())
        for step in range(2):
            if step and (both or acc.process_index):
                model.head.requires_grad_(False)
            acc.backward(model(torch.ones(2, 8)).mean())
        return float(model.blocks[0][0].weight.grad.full_tensor().sum())


def test_a_parameter_that_one_rank_freezes_late(ranks) -> None:
    zero, one = ranks(frozen_late, True)
    assert zero == one
    waiting, frozen = ranks.fails(frozen_late, False)
    assert (waiting.type, frozen.type) == ("WorldError", "WorldError")
    assert "after requires_grad was changed, first of 'head.weight'" in frozen.message


def test_what_a_loss_scale_would_make_wrong_in_silence_is_refused() -> None:
    """Gradients that no optimizer steps in a clip; gradients that nobody clears."""
    settings = Settings(scaler_options=GradScalerKwargs(init_scale=256.0))
    with Accelerator(cpu=True, mixed_precision="fp16", settings=settings) as acc:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        model, optimizer = acc.prepare(model, torch.optim.SGD(model[1].parameters(), lr=0.1))
        acc.backward(model(torch.ones(2, 3)).mean())
        with pytest.raises(StepError, match=r"2 of them \('0.weight' …\) have gradients and are in no prepared"):
            acc.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        acc.backward(model(torch.ones(2, 3)).mean())
        with pytest.raises(StepError, match=r"not cleared.*call optimizer.zero_grad\(\) after each step\(\)"):
            optimizer.step()
        model.zero_grad()
        acc.backward(model(torch.ones(2, 3)).mean())
        acc.clip_grad_norm_(model[1].parameters(), 0.1)
        optimizer.step()
        assert optimizer.updates == 2
