"""How far a training is: its updates and samples, and what lies ahead."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple


class Position(NamedTuple):
    """Updates made, and in all (None: unknown), of the run or (`of_run` is False) of the epoch."""

    updates: int
    total: int | None
    of_run: bool


class Progress:
    """Counts updates, and samples of all ranks; `samples` is None once an update read no prepared loader.

    Attributes:
        epoch: of the loader that the last counted update read; None without one.
    """

    def __init__(self, window: Any) -> None:
        self._window = window
        self.updates = 0
        self.samples: int | None = 0
        self.epoch: int | None = None
        self._loader: Any = None
        self._sample_position = 0  # of the loader at the last update
        self._updates_before = 0  # this pass, as far as this process has made them
        self._total: int | None = None  # updates of the run, once known

    def count(self, updates: int) -> bool:
        """Count up to an optimizer's number of updates. False: another optimizer has reached it before."""
        if updates <= self.updates:
            return False
        self.updates, loader = updates, self._window.reading
        if loader is None:
            self.samples = self.epoch = self._loader = None
            return True
        if loader is not self._loader or loader.epoch != self.epoch:
            self._add_samples()  # the end of the pass before
            self._loader, self.epoch = loader, loader.epoch
            self._sample_position, self._updates_before = 0, updates - 1
        self._add_samples()
        return True

    def finish(self, updates: int) -> None:
        """Count the end of the run, which has made so many updates."""
        self.updates = updates
        self._add_samples()

    def position(self, updates: int) -> Position:
        """The position after `updates`, as far as ``accelerator.epochs(n)`` and the loader's length tell."""
        loader, accumulation, epochs = self._loader, self._window.accumulation, self._window.epochs
        length = None
        with suppress(TypeError):  # no loader, or one without a length
            length = -(-len(loader) // accumulation)
        if length is not None:
            updates_in_pass = updates - self._updates_before
            if loader.total_batch_size:  # also after a resume inside a pass
                batches = -(-self._loader_position() // loader.total_batch_size)
                updates_in_pass = -(-batches // accumulation)
            if epochs is None:
                return Position(updates_in_pass, length, of_run=False)
            epoch, count = epochs
            self._total = updates - updates_in_pass + length * (count - epoch)
        return Position(updates, self._total if self._total and self._total >= updates else None, of_run=True)

    def _loader_position(self) -> int:
        """The samples of the pass; after its end, all of them."""
        loader = self._loader
        if loader.epoch == self.epoch and loader.position:
            return int(loader.position)
        return loader.ended[1] if loader.ended and loader.ended[0] == self.epoch else self._sample_position

    def _add_samples(self) -> None:
        if self._loader is not None:
            before, self._sample_position = self._sample_position, self._loader_position()
            if self.samples is not None:
                self.samples += self._sample_position - before
