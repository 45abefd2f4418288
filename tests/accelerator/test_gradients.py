"""Gradients are right under every strategy, or refused before they are used."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import easymp
from easymp import (
    Accelerator,
    DataLoaderConfiguration,
    EasympError,
    GradScalerKwargs,
    PrepareError,
    Settings,
    StepError,
)

from ..words import make_accelerator

PRECISE = 1e-6


def far(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def share(strategy: str | None, rank: int) -> tuple[int, int]:
    """Which part of the data a rank sees, of how many, on two ranks."""
    return (rank, 2) if strategy not in (None, "tensor_parallel", "pipeline") else (0, 1)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Frozen(Critic):
    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)


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


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The loss of a Wasserstein critic with a gradient penalty."""
    out = model(x.requires_grad_(True))
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean() + out.mean()


def thawed(model: Any, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    model.head.requires_grad_(True)
    return out


# Ways to compute outputs; the loss is made of them.
WAYS: dict[str, Any] = {
    "call": lambda m, x: m(x),
    "forward": lambda m, x: m.forward(x),
    "methods": lambda m, x: m.score(m.embed(x)),
    "twice": lambda m, x: m.score(m.embed(x) * m.embed(-x)) + m(x) + m.around(x),
    "embed": lambda m, x: m.embed(x),
    "child": lambda m, x: m.head(x),
    "thawed": thawed,
}


def trained(
    strategy: str | None,
    kind: type[nn.Module],
    way: str,
    how: dict[str, Any],
    names: tuple[str, ...] = (),
) -> list[torch.Tensor] | None:
    """Rank 0's parameters after four windows of a small training by `way`."""
    torch.manual_seed(0)
    with make_accelerator(**{"mixed_precision": "no", "cpu": True, **how}, strategy=strategy) as acc:
        model = kind()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer = acc.prepare(model, optimizer, forward_methods=names)
        part, parts = share(strategy, acc.process_index)
        generator = torch.Generator().manual_seed(1)
        for _ in range(4 * acc.gradient_accumulation_steps):
            x = torch.randn(8, 8, generator=generator).chunk(parts)[part]
            with acc.accumulate(model):
                if way == "penalty":
                    loss = penalty(model, x)
                else:
                    out = WAYS[way](model, x)
                    loss = out.square().mean() + out.mean()
                acc.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        acc.wait_for_everyone()
        state = dict(acc.weights(model))
        return [value.float() for value in state.values()] if acc.is_main_process else None


# -- methods that compute as forward does ------------------------------------------------------------------------------

NAMES = ("embed", "around")


def by_all_ways(strategy: str | None) -> list[Any]:
    ways = {"forward": 1, "methods": 1, "twice": 2}
    return [trained(strategy, Tower, way, {"gradient_accumulation_steps": n}, NAMES) for way, n in ways.items()]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "tensor_parallel"])
def test_methods_train_as_forward_does(ranks, strategy: str) -> None:
    for got, want in zip(ranks(by_all_ways, strategy)[0], by_all_ways(None), strict=True):
        assert far(got, want) < PRECISE


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

NOT_AVERAGED = r"StepError: .*forward_methods=\('"
REFUSED: list[tuple[tuple[Any, ...], str]] = [
    (
        ("ddp", Critic, "penalty", {"strategy_options": {"static_graph": True}}),
        "StepError: .*create_graph=True and static_graph=True do not go together",
    ),
    *(
        ((strategy, Tower, way, {}, NAMES if way == "child" else ()), NOT_AVERAGED)
        for strategy in ("ddp", "zero1", "fsdp")
        for way in ("embed", "child")
    ),
    (("ddp", Frozen, "thawed", {}), "'head.weight' had requires_grad=False when the model was prepared"),
]


def refusals() -> list[str]:
    said = []
    for case, _ in REFUSED:
        with pytest.raises(EasympError) as caught:
            trained(*case)
        said.append(f"{caught.type.__name__}: {caught.value}")
    return said


def test_what_would_have_wrong_gradients_is_refused(ranks) -> None:
    for found in ranks(refusals):
        for said, (case, words) in zip(found, REFUSED, strict=True):
            assert re.search(words, said), (case, said)


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
