"""A scheduler that counts optimizer updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..clock import StepClock
from .optimizer import PreparedOptimizer


class PreparedScheduler:
    """The user's scheduler, stepped once an optimizer update: not on other micro-steps, nor where an overflow skipped it.

    Args:
        scheduler: any object with `step`.
        optimizers: the prepared optimizers it drives.
        clock: the step clock.
        with_optimizer: False steps it at every call.
        steps: steps of the wrapped scheduler a call (Accelerate: the number of processes).
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[PreparedOptimizer],
        clock: StepClock,
        with_optimizer: bool = True,
        steps: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers)
        self._clock = clock
        self._with_optimizer = with_optimizer
        self._steps = steps

    def step(self, *args: Any, **kwargs: Any) -> None:
        if self._with_optimizer:
            if self._clock.accumulation != 1 and not self._clock.sync:
                return
            if any(optimizer.step_was_skipped for optimizer in self.optimizers):
                return
            for _ in range(self._steps):
                self.scheduler.step(*args, **kwargs)
        else:
            self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)  # while being unpickled
        return getattr(self.scheduler, name)
