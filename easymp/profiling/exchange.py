"""Ranks that profile the same steps show each other what they found, without a collective: any of them may profile alone.

Through the store that all ranks share: each says when it begins and what it found in the end, and the first of those that began
waits a while for the others. The n-th profile of one rank is taken to be the n-th of the others.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any

from ..distributed import World
from .breakdown import Breakdown

PATIENCE = 10.0  # seconds; those that profiled the same steps are done at about the same time


class Exchange:
    """One rank's end of it; of a world of one, nothing."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._store: Any = None
        self.late: list[int] = []  # ranks that began and were not done in time

    def begin(self) -> None:
        if self._world.size > 1:
            self._store = self._world.store()
            number = self._store.add(f"profiles/{self._world.rank}", 1)
            self._key = f"profile/{number}"
            self._store.set(f"{self._key}/begun/{self._world.rank}", "")

    def end(self, own: Breakdown) -> list[Breakdown]:
        """What all ranks found, in order, on the first of them; on others, their own."""
        if self._store is None:
            return [own]
        store, self._store = self._store, None
        try:
            return self._shared(store, own)
        except RuntimeError:  # the world was left inside the block, or rank 0 and its store are gone
            return [own]

    def _shared(self, store: Any, own: Breakdown) -> list[Breakdown]:
        store.set(f"{self._key}/done/{own.rank}", json.dumps(asdict(own)))
        begun = [r for r in range(self._world.size) if store.check([f"{self._key}/begun/{r}"])]
        if begun[0] != own.rank:
            return [own]
        deadline, pause = time.monotonic() + min(PATIENCE, self._world.timeout), 0.001
        waiting = list(begun)
        while waiting and time.monotonic() < deadline:
            waiting = [r for r in waiting if not store.check([f"{self._key}/done/{r}"])]
            if waiting:
                time.sleep(pause)
                pause = min(2 * pause, 0.1)
        self.late = waiting
        done = [r for r in begun if r not in waiting]
        return [
            own if r == own.rank else Breakdown(**json.loads(store.get(f"{self._key}/done/{r}")))
            for r in done
        ]
