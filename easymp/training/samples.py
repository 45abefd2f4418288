"""Which samples an update has read, as places in the order of a prepared loader's epoch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ..data import PreparedLoader

if TYPE_CHECKING:
    from ..base.accumulation import UpdateWindow


class Samples(NamedTuple):
    """The samples of an update: places `begin` to `end` in the order of an epoch, over all ranks."""

    loader: Callable[[], PreparedLoader | None]
    epoch: int
    begin: int
    end: int


class SampleTracker:
    """Follows the places of the updates of one run."""

    def __init__(self, window: UpdateWindow) -> None:
        self._window = window
        self._last = Samples(lambda: None, 0, 0, 0)  # of the last update

    def samples(self) -> Samples | None:
        """The samples of this update; None if they do not come from a prepared loader. Call it at each update."""
        window, last = self._window, self._last
        loader = window.reading
        if not isinstance(loader, PreparedLoader):
            return None
        begin, continues = last.end, last.loader() is loader and last.epoch == loader.epoch
        if continues and begin == loader.position:  # another optimizer's part of the same update
            return last
        if not continues or begin > loader.position:
            micro_steps = window.micro if window.accumulation != 1 else 1
            begin = max(0, loader.position - micro_steps * (loader.total_batch_size or loader.position))
        self._last = Samples(weakref.ref(loader), loader.epoch, begin, loader.position)
        return self._last
