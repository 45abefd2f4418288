"""Models built on the meta device.

The values of a normal construction, in every strategy, and never whole where they are sharded.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from easymp import PrepareError
from easymp.strategies.meta_init import materialise

from .models import Of, Tied, conv, mean_square, mlp, sgd, under, update, whole


class Scaled(nn.Module):
    """A parameter of its own, a buffer that resetting fills, and one made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.empty(3))
        self.register_buffer("mask", torch.empty(3, dtype=torch.bool))
        self.register_buffer("positions", torch.arange(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)
        self.mask.fill_(True)
        self.positions = torch.arange(3)


class Rooted(nn.Module):
    """Draws everything again at the end of its construction, as nn.Transformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return nn.Sequential(*self.blocks)(x)


KINDS: dict[str, Any] = {
    "mlp": mlp,
    "conv": conv,
    "tied": Tied,
    "scaled": Scaled,
    "rooted": Rooted,
    "lstm": lambda: nn.LSTM(3, 4, 2, bidirectional=True),
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 16),
    "twice": lambda: nn.Sequential(*[nn.Linear(2, 2)] * 2, nn.BatchNorm1d(2, affine=False)),
}


def meta(build: Any) -> nn.Module:
    with torch.device("meta"):
        return build()


@pytest.mark.parametrize("kind", KINDS)
def test_the_seeds_values(kind: str) -> None:
    model = meta(KINDS[kind])
    names = {id(p): name for name, p in model.named_parameters()}
    torch.manual_seed(3)
    materialise(model, torch.device("cpu"))
    after = torch.rand(1)
    torch.manual_seed(3)
    normal = KINDS[kind]()
    assert torch.equal(after, torch.rand(1))
    torch.testing.assert_close(model.state_dict(), normal.state_dict(), rtol=0, atol=0)
    # the same objects, for optimizers and ties
    assert {id(p): name for name, p in model.named_parameters()} == names
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in normal.parameters()]


def test_frozen_and_tied_stay_so() -> None:
    model: Any = meta(Tied)
    model.embed.requires_grad_(False)
    materialise(model, torch.device("cpu"))
    assert model.head.weight is model.embed.weight and not model.embed.weight.requires_grad


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 5.0)


def bare() -> nn.Module:
    return Of(None, weight=nn.Parameter(torch.randn(2)))


def loose() -> nn.Module:
    part = nn.Linear(2, 2)
    part.gain = nn.Parameter(torch.ones(2))
    return Of(None, part=part)


def halfway() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.zeros(2, 2, device="cpu"))
    return model


def table() -> nn.Module:
    return Of(None, part=nn.Linear(2, 2), table=torch.arange(4))


@pytest.mark.parametrize(
    ("build", "pattern"),
    [
        (lambda: nn.Sequential(bare()), "Of '0' has 'weight' on the meta device"),
        (loose, r"nothing gave 'gain' of Linear values after .*pass Settings\(initialize=function\)"),
        (Named, "initialize=model._init_weights will do"),
        (table, "this Of has a tensor 'table' on the meta device that is neither"),
        (halfway, "this Linear has 'bias' on the meta device and values"),
    ],
)
def test_what_gets_no_values_is_named(build: Any, pattern: str) -> None:
    with under() as acc, pytest.raises(PrepareError, match=pattern):
        acc.prepare(meta(build))


def test_what_had_values_keeps_them() -> None:
    model = Rooted()
    model.blocks[1] = meta(lambda: nn.Linear(12, 12))
    before = model.blocks[0][0].weight.clone()
    materialise(model, torch.device("cpu"))
    assert torch.equal(model.blocks[0][0].weight, before) and not model.blocks[1].weight.isnan().any()


def test_initialize_fills_what_resetting_does_not() -> None:
    model, classes = meta(lambda: nn.Sequential(bare(), nn.Linear(2, 2))), []

    def fill(module: nn.Module) -> None:
        classes.append(type(module).__name__)
        nn.init.constant_(module.weight, 2.0)

    with under(initialize=fill) as acc:
        acc.prepare(model)
    assert classes == ["Of", "Linear"]
    assert all(bool((p == 2.0).all()) for p in (model[0].weight, model[1].weight))
    assert float(model[1].bias.detach().abs().sum()) > 0


def prepared(strategy: str, kind: str, same_seed: bool = True) -> list[dict[str, Tensor]]:
    """Weights after two steps of a model built normally, and of one built on the meta device."""
    states = []
    for on_meta in (False, True):
        with under(strategy) as acc:
            torch.manual_seed(3 if same_seed else acc.process_index)
            model: Any = meta(KINDS[kind]) if on_meta else KINDS[kind]()
            torch.manual_seed(3 if same_seed else acc.process_index)
            model, optimizer = acc.prepare(model, sgd(list(model.parameters())))
            for _ in range(2):
                update(acc, optimizer, mean_square(model(torch.ones(4, 12))))
            states.append({name: whole(t) for name, t in model.state_dict().items()})
    return states


@pytest.mark.parametrize(("strategy", "kind"), [("ddp", "conv"), ("fsdp", "tied"), ("fsdp", "rooted")])
def test_it_trains_as_if_built_normally(ranks, strategy: str, kind: str) -> None:
    for normal, got in ranks(prepared, strategy, kind):
        torch.testing.assert_close(got, normal, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_unlike_seeds_take_rank_0s_values(ranks, strategy: str) -> None:
    (_, zero), (_, one) = ranks(prepared, strategy, "tied", False)
    torch.testing.assert_close(zero, one, rtol=0, atol=0)


def peak(kind: str) -> tuple[int, int, int]:
    """Most whole elements with values at any time, those of the model, and of its largest block."""
    model, largest = meta(KINDS[kind]), 0

    def count(module: nn.Module) -> None:
        nonlocal largest
        elements = sum(p.numel() for p in model.parameters() if not p.is_meta and not hasattr(p, "to_local"))
        largest = max(largest, elements)

    with under("fsdp", initialize=count) as acc:
        acc.prepare(model)
        total, block = (sum(p.numel() for p in m.parameters()) for m in (model, model.blocks[0]))
        return largest, total, block


def test_no_rank_ever_holds_the_whole(ranks) -> None:
    for largest, total, block in ranks(peak, "tied"):
        outer = total - 3 * block
        assert largest <= block + outer < total
    # its root draws all values again, so that none may be sharded before
    for largest, total, _ in ranks(peak, "rooted"):
        assert largest == total
