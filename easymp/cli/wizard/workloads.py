"""What the measurement runs: three small networks, forward and backward, of any width and in any precision.

Of each, the work grows eightfold where the width doubles. Nothing is made before the first call, which is a warm-up in any case.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...base.torch_flags import switch
from ...precision import PRECISIONS

HEAD = 64  # width of a head of attention, as most models have


class Attention(nn.Module):
    """Self-attention of (batch, tokens, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = (
            self.mixed(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )  # (3, batch, heads, tokens, HEAD)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        return self.out(mixed.transpose(1, 2).flatten(2))


def products(width: int) -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)), (
        2 * width,
        width,
    )


def convolutions(width: int) -> tuple[nn.Module, tuple[int, ...]]:
    planes = width // 4
    layers = [nn.Conv2d(planes, planes, 3, padding=1, bias=False), nn.BatchNorm2d(planes), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(planes, planes, 3, padding=1, bias=False)), (
        max(1, width // 32),
        planes,
        32,
        32,
    )


def attention(width: int) -> tuple[nn.Module, tuple[int, ...]]:
    return Attention(width), (max(1, width // 32), min(1024, 2 * width), width)


# A network and the shape of its input, by what it is.
BLOCKS: dict[str, Callable[[int], tuple[nn.Module, tuple[int, ...]]]] = {
    "products": products,
    "convolutions": convolutions,
    "attention": attention,
}


@dataclass(frozen=True)
class Sample:
    """One network on a device, for all precisions."""

    block: str
    width: int
    device: torch.device

    @cached_property
    def made(self) -> tuple[nn.Module, Tensor]:
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay what they were
            module, shape = BLOCKS[self.block](self.width)
            return module.to(self.device), torch.randn(shape).to(self.device)


@dataclass(frozen=True)
class Work:
    """A network in a precision: each call is one forward and backward."""

    sample: Sample
    precision: str

    @property
    def block(self) -> str:
        return self.sample.block

    @property
    def width(self) -> int:
        return self.sample.width

    @cached_property
    def _made(self) -> tuple[nn.Module, Tensor, list[Tensor]]:
        module, x = self.sample.made
        return PRECISIONS[self.precision]().forward(module, self.sample.device), x, list(module.parameters())

    def __call__(self) -> None:
        with ExitStack() as stack:
            policy = PRECISIONS[self.precision]
            switch(policy.tf32 and self.sample.device.type != "cpu", False, stack.callback)  # type: ignore[attr-defined]
            module, x, parameters = self._made
            torch.autograd.grad(module(x).float().sum(), parameters)


def together(values: list[float]) -> float:
    """The geometric mean: that of ratios one way is one over that of the other."""
    return math.exp(sum(map(math.log, values)) / len(values))
