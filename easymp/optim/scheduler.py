"""A scheduler that counts optimizer updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim.swa_utils import SWALR

from .optimizer import PreparedOptimizer


class PreparedScheduler:
    """The user's scheduler, stepped only after an optimizer update: not on other micro-steps, nor where an overflow skipped it.

    Args:
        scheduler: any object with `step`.
        optimizers: the prepared optimizers it drives.
        with_optimizer: False steps it at every call.
        steps: steps of the wrapped scheduler a call (Accelerate: the number of processes).

    Attributes:
        each_update: whether the script's last call followed the one before by one update, and had no arguments.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[PreparedOptimizer],
        with_optimizer: bool = True,
        steps: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers)
        self._with_optimizer = with_optimizer
        self._steps = steps
        self._seen = [optimizer.updates for optimizer in self.optimizers]
        self.each_update = False

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the schedule, if there was an update since the last call: after each batch, or once an epoch."""
        if self._with_optimizer:
            since = max(self.behind, default=0)
            if since:
                self.each_update = since == 1 and not args and not kwargs
            if not self._updated():
                return
        if not self._with_optimizer or self._steps == 1:
            self.scheduler.step(*args, **kwargs)
            return
        for _ in range(self._steps):
            if not self._at_horizon():
                self.scheduler.step(*args, **kwargs)

    def _at_horizon(self) -> bool:
        """Whether torch would refuse a further step (OneCycleLR). Ranks are given whole rounds of batches: counted a process, they come to
        more steps than the loader had batches before it was shared out."""
        total = getattr(self.scheduler, "total_steps", None)
        return total is not None and self.scheduler.last_epoch >= total

    def _updated(self) -> bool:
        since = self.behind
        self.behind = [0] * len(since)
        # Several updates in a row are not all skipped: the scale falls with each.
        return any(
            n > 1 or (n == 1 and not optimizer.step_was_skipped)
            for n, optimizer in zip(since, self.optimizers)
        )

    @property
    def behind(self) -> list[int]:
        """Updates of each optimizer since the last call of `step`."""
        return [optimizer.updates - seen for optimizer, seen in zip(self.optimizers, self._seen)]

    @behind.setter
    def behind(self, counts: Sequence[int]) -> None:
        self._seen = [optimizer.updates - count for optimizer, count in zip(self.optimizers, counts)]

    def get_last_lr(self) -> list[float]:
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        state = self.scheduler.state_dict()
        if isinstance(self.scheduler, SWALR):
            state.pop(
                "anneal_func", None
            )  # a function that its constructor sets; in its state before torch 2.10
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)  # while a copy is being made of it
        return getattr(self.scheduler, name)
