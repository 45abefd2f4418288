"""Precision "auto" on CPUs with bf16 instructions: times fp32 and bf16 in the first training step and keeps the faster one.

bf16 autocast took 0.5 to 1.7 times as long as fp32 on one machine, by the model. The first training call of a prepared model is timed
with its own inputs, forward and backward, in turns of fp32 and bf16, for about a second. bf16 wins below 95 % of the time of fp32, by the
median. Inputs, gradients, parameters, buffers and random states stay unchanged. Rank 0 decides for all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..base.pytree import leaves, map_leaves
from ..base.rng import isolated
from ..distributed import World
from ..options import AutocastKwargs
from ..protocols import Choice, Facts, Refusal, Source
from .policies import BF16, FP32

BUDGET = 1.0  # seconds for the pairs
PATIENCE = 5.0  # seconds for the fewest pairs; a slower step gets one pair
PAIRS = (5, 40)
GAIN = 0.95
WIDE = 128  # smallest layer width for which bf16 was faster on CPUs, for models that cannot be measured


class Measured(FP32):
    """fp32 or bf16, the faster one. One decision, told to `decided`, holds for all models; without `measure` the widest layer decides."""

    raises: ClassVar[bool] = True

    def __init__(
        self, options: AutocastKwargs, world: World, measure: bool = True, decided: Any = None
    ) -> None:
        super().__init__(options)
        self._fp32, self._bf16 = FP32(options), BF16(options)
        self._world, self._measure, self._decided = world, measure, decided
        self.choice: Choice[str] | None = None

    @property
    def _current(self) -> FP32 | BF16:
        return self._bf16 if self.choice is not None and self.choice.value == "bf16" else self._fp32

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.choice.value if self.choice else "auto"

    @property
    def compute(self) -> torch.dtype:  # type: ignore[override]
        return self._current.compute

    @property
    def gather(self) -> torch.dtype | None:
        return self._current.gather

    @property
    def output(self) -> torch.dtype | None:
        return self._current.output

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        if facts.device != "cpu":
            return Refusal("the rules for accelerators are certain", "name a precision")
        return None

    def decide(self, model: nn.Module) -> None:
        if self.choice is None:
            self.settle(*by_width(model))

    def convert(self, model: nn.Module) -> nn.Module:
        if not self._measure:
            self.decide(model)
        return model

    def forward(self, model: nn.Module, device: torch.device) -> nn.Module:
        return self._current.forward(model, device) if self.choice else Undecided(self, model, device)

    def casting(self, device: torch.device, options: AutocastKwargs) -> AbstractContextManager[Any]:
        return self._current.casting(device, options)

    def follow(self, name: str) -> bool:
        """Take the precision of the resumed run. Returns False if it is neither fp32 nor bf16."""
        known = name in (self._fp32.name, self._bf16.name)
        if known:
            self.settle(name, "as in the run that this one resumes")
        return known

    def settle(self, name: str, reason: str) -> None:
        self.choice = Choice(name, reason, Source.DETECTED)
        if self._decided:
            self._decided(self.choice)

    def measure(self, model: nn.Module, device: torch.device, args: Any, kwargs: Any) -> None:
        """Time both, tell the other ranks, settle. If the model fails in fp32, too, nothing is settled and the error is raised."""
        figure: list[Any] = [None]
        try:
            # Every rank takes every step, since a forward may hold a collective; rank 0 ends them, and its figure counts.
            cast = self._bf16.forward(model, device)
            figure[0] = time_pairs(model, cast, args, kwargs, self._agree)
        finally:
            self._world.broadcast_objects(figure)
        if isinstance(figure[0], str):
            self.settle("fp32", f"this model does not run in bf16 ({figure[0]})")
        elif figure[0] is not None:
            self.settle(*_verdict(*figure[0]))

    def _agree(self, enough: bool) -> bool | None:
        agreed: bool | None = self._world.broadcast_objects([enough])[0]
        return agreed


def _verdict(ratio: float, pairs: int) -> tuple[str, str]:
    """The precision for `ratio`, bf16's time by fp32's, and the reason."""
    if ratio < GAIN:
        reason = f"bf16 {1 / ratio:.2g} times as fast as fp32 in this model's own step"
    elif ratio > 1 / GAIN:
        reason = f"fp32 {ratio:.2g} times as fast as bf16 in this model's own step"
    else:
        reason = f"bf16 takes {ratio:.2f} times fp32's time in this model's own step: no gain"
    many = f"{pairs} pairs" if pairs > 1 else "one pair"
    return "bf16" if ratio < GAIN else "fp32", f"{reason} (median of {many})"


class Undecided(nn.Module):
    """Model until its first training call has been timed."""

    def __init__(self, policy: Measured, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.module, self.policy, self.device = module, policy, device
        self.chosen: nn.Module | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        policy = self.policy
        if policy.choice is None and self.module.training and torch.is_grad_enabled():
            policy.measure(self.module, self.device, args, kwargs)
        if policy.choice is None:
            return self.module(*args, **kwargs)
        if self.chosen is None:
            self.chosen = policy.forward(self.module, self.device)
        return self.chosen(*args, **kwargs)


def by_width(model: nn.Module) -> tuple[str, str]:
    """Rule without a measurement: bf16 if min(in × kernel, out) of a layer is 128 or more."""
    widest = 0
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim >= 2 and not isinstance(module, nn.Embedding):
            widest = max(widest, min(weight.shape[0], weight[0].numel()))
    if widest >= WIDE:
        return "bf16", f"bf16 instructions, and a layer {widest} wide (not measured)"
    return "fp32", f"the widest layer is {widest}: too narrow for bf16 to pay off on a CPU (not measured)"


def time_pairs(
    plain: nn.Module, cast: nn.Module, args: Any, kwargs: Any, agree: Callable[[bool], bool | None]
) -> tuple[float, int] | str:
    """Median of bf16 time / fp32 time and the number of pairs, or the reason why bf16 does not run. `agree` asks rank 0 to end it."""
    parameters = [p for p in plain.parameters() if p.requires_grad]
    ratios: list[float] = []
    with isolated(), _buffers_kept(plain):
        _step(plain, parameters, args, kwargs)  # warm up: allocations and choice of kernels
        try:
            _step(cast, parameters, args, kwargs)
        except Exception as error:
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        begin = time.perf_counter()
        while len(ratios) < PAIRS[1]:
            fp32 = _step(plain, parameters, args, kwargs)
            ratios.append(_step(cast, parameters, args, kwargs) / fp32)
            limit = BUDGET if len(ratios) >= PAIRS[0] else PATIENCE
            if agree(time.perf_counter() - begin > limit) is not False:
                break
    return median(ratios), len(ratios)


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore buffers, also replaced ones, at exit."""
    held = [
        (m, k, b, b.detach().clone()) for m in model.modules() for k, b in m._buffers.items() if b is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, before in held:
                module._buffers[name] = buffer
                buffer.copy_(before)


def _step(module: nn.Module, parameters: list[Tensor], args: Any, kwargs: Any) -> float:
    """Seconds of one forward and backward on copies of the inputs, with the sum of the outputs as loss."""
    args, kwargs = map_leaves(_copy, args), map_leaves(_copy, kwargs)
    begin = time.perf_counter()
    outputs = [o for o in leaves(module(*args, **kwargs)) if isinstance(o, Tensor) and o.requires_grad]
    if outputs and parameters:
        torch.autograd.grad(sum(o.float().sum() for o in outputs), parameters, allow_unused=True)
    return time.perf_counter() - begin


def _copy(leaf: Any) -> Any:
    """Copy of a tensor: models may change inputs in place."""
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
