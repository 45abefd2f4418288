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
        backwards: backward passes in the current micro-step; without `accumulate`, in the run.
        inside: whether an `accumulate` block is open.
        end_with_loader: whether the last batch of the loader being read ends the window early.
        between: called where the body of a training loop has come to its end, if anyone wants to know.
        stepped: what is called with a prepared optimizer after each of its updates.
        timing: told what loaders wait for, while a profile is open.
        rounds: how many rounds of an outermost loop have been told of, by `hold`.
        resuming: ids of loaders whose next pass is the rest of one, of which a state was loaded.
        went_on: whether one of them has gone on since.
        enclosing: the loader of the innermost running loop.
        reading: the same, or, where there is no loop, that of an iterator which the script holds.
        outermost: the loader of the outermost running loop, or of such an iterator.
    """

    __slots__ = (
        *(
            "_at_end",
            "_beside",
            "_reading",
            "accumulation",
            "backwards",
            "between",
            "enclosing",
            "end_with_loader",
            "inside",
            "micro",
            "outermost",
            "reading",
            "resuming",
        ),
        *("rounds", "stepped", "sync", "timing", "went_on"),
    )

    def __init__(self, accumulation: int = 1, end_with_loader: bool = True) -> None:
        self.accumulation = accumulation
        self.end_with_loader = end_with_loader
        self.between: Callable[[], None] | None = None
        self.stepped: list[Callable[[Any], None]] = []
        self.timing: Timing | None = None
        self.rounds = 0
        self.resuming: set[int] = set()
        self.went_on = False
        self.reset()

    def reset(self) -> None:
        """Forget the window and the loops: nothing has been trained yet."""
        self.micro = 0
        self.backwards = 0
        self.sync = True
        self.inside = False
        self._reading: list[Any] = []  # loops inside of loops
        self._beside: list[Any] = []  # iterators that the script holds, and asks when it likes
        self._at_end = False
        self._look()

    def _look(self) -> None:
        """After each change of what is read: loops are asked about at every batch, and change once a pass."""
        self.enclosing: Any | None = self._reading[-1] if self._reading else None
        there = self._reading or self._beside or [None]
        self.reading: Any | None = there[-1]
        self.outermost: Any | None = there[0]

    def tick(self) -> bool:
        """Begin a micro-step; returns whether it ends its window."""
        self.micro = 1 if self.sync else self.micro + 1
        self.backwards = 0
        reading = self.reading
        self.sync = self.micro >= self.accumulation or bool(
            self.end_with_loader and reading is not None and reading.last
        )
        return self.sync

    def enter(self, loader: Reading, beside: bool = False) -> None:
        """`loader` begins to be read: the innermost loop is the one that counts, and not what is read `beside` it."""
        (self._beside if beside else self._reading).append(loader)
        self._at_end = False
        self._look()

    def asks(self, loader: Reading) -> None:
        """`loader` is asked for a batch: what began after it and is still open is no loop in its body, but read beside it."""
        nest = self._reading
        if any(one is loader for one in nest):
            while nest[-1] is not loader:
                self._beside.append(nest.pop())
            self._look()

    def hold(self) -> None:
        """A round of the outermost loop begins: no loop is open, so what is being read is held by the script."""
        self.rounds += 1
        self._beside[:0] = self._reading
        self._reading.clear()
        self._look()

    def leave(self, loader: Reading) -> None:
        """`loader` is read no more, whether exhausted or left early."""
        for there in (self._reading, self._beside):
            for i in range(len(there) - 1, -1, -1):
                if there[i] is loader:
                    del there[i]
                    self._at_end = loader.last
                    self._look()
                    return

    @property
    def last(self) -> bool:
        """Whether the last batch of the loader being read, or read before, has been handed out, and ends a window."""
        loader = self.reading
        return self.end_with_loader and (self._at_end if loader is None else loader.last)
