"""Python's garbage collection in a run: what is there after the first update is frozen, and it runs every 500th.

In between it would stop a rank at any time, and the others with it; and it would look through all modules again.
"""

from __future__ import annotations

import gc
from typing import Any

from ..base.parts import Part

EVERY = 500  # updates from one garbage collection to the next


class GarbageCollection(Part):
    """Collects garbage at every 500th update only."""

    name = "gc"

    def __init__(self) -> None:
        self._updates, self._frozen, self._was_enabled = 0, False, False

    def stepped(self, optimizer: Any) -> None:
        self._updates += 1
        if self._updates == 1:
            self._frozen, self._was_enabled = not gc.get_freeze_count(), gc.isenabled()
            if self._frozen:
                gc.freeze()
            gc.disable()
        elif self._updates % EVERY == 0:
            gc.collect()

    def released(self) -> None:
        """As before the first update; the next one is the first again."""
        if self._frozen:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()
        self._updates, self._frozen, self._was_enabled = 0, False, False
