"""Losses and gradient norms that are not finite: reported once, with step, rank and loss scale; skipped; or raised on all ranks.

Reports do not synchronise with the device: the numbers of several steps are copied to the host together, and read when they have arrived.
To skip, gradients are checked before each step, as under a loss scale (by a `Scaler` with scale 1 where there is none). To raise, losses
are checked, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from ..base.dtensor import local
from ..distributed import World
from ..errors import NonfiniteError
from ..logging import get_logger
from ..precision import Scaler
from ..trackers.rows import Pending, Row

logger = get_logger(__name__)

TOGETHER = 32  # numbers that go to the host in one transfer
LOSS, NORM, GRADIENTS = "the loss", "the gradient norm", "the gradients"
FOLLOWS = {
    "warn": "The step is taken, and the weights will not be finite either: nonfinite='skip' leaves such steps out, nonfinite='raise' "
    "makes them an error",
    "skip": "Steps with such gradients are skipped on all ranks; optimizer_step_was_skipped says so",
}


class Nonfinite:
    """The guard of one run.

    Args:
        mode: "warn", "skip" or "raise"; None: "skip" under a loss scale, else "warn".
        updates: updates of the optimizer so far.
        precision: its name.
    """

    def __init__(
        self,
        mode: str | None,
        world: World,
        scaler: Scaler,
        updates: Callable[[], int],
        precision: Callable[[], str],
    ) -> None:
        self._raises = mode == "raise"
        self._follows = FOLLOWS["skip" if scaler.enabled else "warn"]
        self._world, self._scaler, self._updates, self._precision = world, scaler, updates, precision
        self._pending = Pending()
        self._said = False
        self._bad = False  # a loss of this rank was not finite since the last step, where that is raised
        self._steps = 0
        if scaler.enabled:
            scaler.found = self._step

    def loss(self, loss: Tensor) -> None:
        """Look at a loss of this rank, before backward."""
        if self._raises:
            self._bad |= not bool(local(loss.detach()).isfinite().all())
        elif not self._said and not (loss.is_cpu and loss.ndim == 0 and math.isfinite(loss.item())):
            self._note(LOSS, local(loss.detach()), self._updates() + 1)

    def norm(self, norm: Tensor) -> None:
        """Look at a gradient norm. Not under a loss scale, where an overflow is how the scale is found."""
        if self._said or self._raises or self._scaler.scales:
            return
        if not (norm.is_cpu and math.isfinite(norm.item())):
            self._note(NORM, local(norm.detach()), self._updates() + 1)

    def skips(self) -> None:
        """Note that steps with such gradients are left out."""
        self._follows = FOLLOWS["skip"]

    def forget(self) -> None:
        """Forget the losses since the last step, which does not come."""
        self._bad = False

    def _step(self, found: Tensor) -> None:
        """Called at the begin of a step, which is skipped if `found` is above 0 on all ranks."""
        scaler = self._scaler
        if self._raises:
            if found.item() or (scaler.agree and self._world.any(self._bad)) or self._bad:
                self._raise()
        elif not self._said:
            self._steps += 1
            if not scaler.scales:
                self._note(GRADIENTS, found, self._updates())
            elif found.device.type == "cpu" or self._steps % TOGETHER == 0:
                # With a loss scale, an overflow is reported only once the scale is down at 1.
                self._note(GRADIENTS, found * (scaler.current <= 1), self._updates())

    def finish(self) -> None:
        """At the end of the run, report numbers that are still being copied."""
        self._pending.send()
        self._read(wait=True)

    def _note(self, name: str, value: Tensor, step: int) -> None:
        value = value.sum() if value.ndim else value
        if value.device.type == "cpu":
            self._look(name, value.item(), step)
            return
        self._pending.add(Row(step, 0.0, {name: value}))
        if len(self._pending) >= TOGETHER:
            self._pending.send()
        self._read()

    def _read(self, wait: bool = False) -> None:
        for row in self._pending.arrived(wait):
            for name, value in row.values.items():
                self._look(name, value, row.step)

    def _look(self, name: str, value: float, step: int) -> None:
        if self._said or (value == 0 if name is GRADIENTS else math.isfinite(value)):
            return
        self._said = True
        # Averaging spreads one rank's number to all ranks a step later: only the first rank reports it.
        if self._world.size == 1 or self._world.store().add("nonfinite", 1) == 1:
            what = f"{name} is {value}" if name is not GRADIENTS else f"{name} are not finite"
            logger.warning(
                "rank %d, step %d: %s (%s). %s",
                *(self._world.rank, step, what, self._words(), self._follows),
                main_process_only=False,
            )

    def _words(self) -> str:
        scaler = self._scaler
        scale = f"loss scale {scaler.in_use:g}" if scaler.scales else "no loss scale"
        return f"precision {self._precision()}, {scale}"

    def _raise(self) -> None:
        scaler, world = self._scaler, self._world
        mine, self._bad = self._bad, False
        everywhere = world.gather_objects(mine) if scaler.agree else [mine]
        if scaler.scales and not any(everywhere) and scaler.in_use > 1:
            return  # the scale is being found
        ranks = [str(rank) for rank, bad in enumerate(everywhere) if bad]
        what = f"{LOSS} is not finite on rank {', '.join(ranks)}" if ranks else f"{GRADIENTS} are not finite"
        raise NonfiniteError(
            f"step {self._updates()}: {what} ({self._words()}). No weights have changed in this step. Look at the data and the learning "
            "rate, or use nonfinite='skip' to leave such steps out"
        )
