"""``accelerate.scheduler``."""

from __future__ import annotations

from typing import Any

from ...optim import PreparedScheduler

__all__ = ["AcceleratedScheduler"]


class AcceleratedScheduler(PreparedScheduler):
    """Accelerate's rule: each call on a synchronizing micro-step steps the schedule once a process, unless the last update was skipped.

    `easymp`'s own rule counts optimizer updates; this one counts calls, so steps before the first update and after several updates count.
    """

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the schedule; the step past `total_steps` of a schedule that has them is left out."""
        if not self._with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        self.each_update = max(self.behind, default=0) == 1 and not args and not kwargs
        self.behind = [0] * len(self.optimizers)
        if not self.optimizers[0].synchronizes or any(
            optimizer.step_was_skipped for optimizer in self.optimizers
        ):
            return
        for _ in range(self._steps):
            if not self._at_horizon():
                self.scheduler.step(*args, **kwargs)
