"""Anything with `state_dict` and `load_state_dict` in a checkpoint: schedulers, loaders, the loss scale, the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .snapshot import Reading, Snapshot


class ObjectState:
    """The state of `thing` under `name`; of rank 0, unless it is each rank's `own`."""

    def __init__(self, name: str, thing: Any, own: bool = False) -> None:
        self._name, self._thing, self._own = f"state/{name}", thing, own

    def bring(self, into: Snapshot) -> None:
        if into.rank == 0 or self._own:
            into.add(self._name, self._thing.state_dict(), own=self._own)

    def take(self, source: Reading) -> Callable[[], None]:
        state = source.state(self._name, own=self._own)
        return lambda: self._thing.load_state_dict(state)
