"""The step clock: which micro-step this is, and whether it ends an accumulation window.

One clock an Accelerator. Loaders tell it which of them is being read and whether that one yields its last batch;
`accumulate` ticks it; optimizers and schedulers ask it. It knows nothing of models or ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Reading(Protocol):
    """A loader, as far as the clock cares."""

    last: bool  # whether the batch being worked on is the loader's last


class Timing(Protocol):
    """Who wants to know when a loader makes its loop wait."""

    def asks(self, loader: Any) -> None:
        """`loader` is about to be asked for a batch."""
        ...

    def has(self, loader: Any) -> None:
        """It has one."""
        ...

    def over(self, loader: Any) -> None:
        """Its pass is over."""
        ...


class StepClock:
    """Counts micro-steps.

    Attributes:
        accumulation: micro-steps in a full window.
        micro: micro-steps begun in the current window.
        sync: whether the current micro-step ends its window, so that gradients are reduced and optimizers step.
        backwards: backward passes in the current micro-step.
        inside: whether an `accumulate` block is open.
        end_with_loader: whether the last batch of the loader being read ends the window early.
        between: called where the body of a training loop has come to its end, if anyone wants to know.
        stepped: called after each update of a prepared optimizer with the number of its updates, if anyone wants to know.
        timing: told what loaders wait for, while a profile is open.
    """

    __slots__ = (
        *("_reading", "accumulation", "backwards", "between", "end_with_loader", "inside", "micro", "stepped", "sync", "timing"),
    )

    def __init__(self, accumulation: int = 1, end_with_loader: bool = True) -> None:
        self.accumulation = accumulation
        self.end_with_loader = end_with_loader
        self.between: Callable[[], None] | None = None
        self.stepped: Callable[[int], None] | None = None
        self.timing: Timing | None = None
        self.reset()

    def reset(self) -> None:
        """Forget the window and the loops: nothing has been trained yet."""
        self.micro = 0
        self.backwards = 0
        self.sync = True
        self.inside = False
        self._reading: list[Any] = []

    def tick(self) -> bool:
        """Begin a micro-step; returns whether it ends its window."""
        self.micro = 1 if self.sync else self.micro + 1
        self.backwards = 0
        reading = self._reading
        self.sync = self.micro >= self.accumulation or bool(self.end_with_loader and reading and reading[-1].last)
        return self.sync

    def enter(self, loader: Reading) -> None:
        """`loader` begins to be read: the innermost loop is the one that counts."""
        self._reading.append(loader)

    def leave(self, loader: Reading) -> None:
        """`loader` is read no more, whether exhausted or left early."""
        for i in range(len(self._reading) - 1, -1, -1):
            if self._reading[i] is loader:
                del self._reading[i]
                return

    @property
    def outermost(self) -> Any | None:
        """The loader of the outermost running loop."""
        return self._reading[0] if self._reading else None

    @property
    def reading(self) -> Any | None:
        """The loader of the innermost running loop."""
        return self._reading[-1] if self._reading else None
