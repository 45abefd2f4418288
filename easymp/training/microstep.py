"""One micro-step of an accumulation window, and the guard against optimizers that do not know of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..base.accumulation import StepClock
from ..errors import StepError
from ..protocols import Strategy


class MicroStep:
    """Ticks the clock, and keeps gradients to this rank unless the window ends; with `local`, also then."""

    __slots__ = ("_clock", "_local", "_modules", "_open", "_strategy")

    def __init__(
        self, clock: StepClock, strategy: Strategy, modules: Sequence[nn.Module], local: bool = False
    ) -> None:
        self._clock = clock
        self._strategy = strategy
        self._modules = modules
        self._local = local
        self._open: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        self._clock.inside = True
        if not self._clock.tick() or self._local:
            for module in self._modules:
                quiet = self._strategy.no_sync(module)
                quiet.__enter__()
                self._open.append(quiet)

    def __exit__(self, *error: Any) -> None:
        self._clock.inside = False
        while self._open:
            self._open.pop().__exit__(*error)


class ForeignSteps:
    """While entered, an optimizer that holds prepared parameters but was not prepared may not step inside a window.

    It would step at each micro-batch, on a part of the gradient. torch calls the hook at every step of every optimizer.
    """

    def __init__(
        self,
        clock: StepClock,
        owner: Mapping[int, str],
        stepped_by: Mapping[int, Any],
        optimizers: Sequence[Any],
    ) -> None:
        self._clock, self._owner, self._stepped_by, self._optimizers = clock, owner, stepped_by, optimizers

    def __enter__(self) -> ForeignSteps:
        self._hook = register_optimizer_step_pre_hook(self._check)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _check(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._clock.inside or self._clock.accumulation == 1:
            return
        for known in self._optimizers:
            if optimizer is known.optimizer or optimizer is known.given:
                return  # also if it holds more than it did when it was prepared: groups are added
        held = (id(p) for group in optimizer.param_groups for p in group["params"])
        if any(p in self._owner and p not in self._stepped_by for p in held):
            raise StepError(
                f"{type(optimizer).__name__} stepped inside accumulate() but was not prepared: it would step at each of the "
                f"{self._clock.accumulation} micro-batches. Pass it to prepare() and use what that returns"
            )
