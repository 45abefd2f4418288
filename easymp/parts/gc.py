"""Python's garbage collection in a run: objects of the first update are frozen, and it runs at every 500th update.

Automatic collections stop one rank at any time, so that the others wait; and they look through all modules again.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

from ..base.parts import Part

EVERY = 500  # updates from one garbage collection to the next


class GarbageCollection(Part):
    """Collects garbage at every 500th update only."""

    name = "gc"

    def __init__(self) -> None:
        self._updates = 0
        self._put_back: weakref.finalize[..., Any] | None = None  # also called where the Accelerator is dropped

    def stepped(self, optimizer: Any) -> None:
        self._updates += 1
        if self._updates == 1:
            freezes = not gc.get_freeze_count()
            self._put_back = weakref.finalize(self.accelerator, put_back, freezes, gc.isenabled())
            self._put_back.atexit = False
            if freezes:
                gc.freeze()
            gc.disable()
        elif self._updates % EVERY == 0:
            gc.collect()

    def released(self) -> None:
        """Restore the collector's state; the next update counts as the first one."""
        if self._put_back is not None:
            self._put_back()
        self._updates = 0


def put_back(frozen: bool, was_enabled: bool) -> None:
    """Let garbage be collected as before."""
    if frozen:
        gc.unfreeze()
    if was_enabled:
        gc.enable()
