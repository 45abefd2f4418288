"""Anything with `state_dict` and `load_state_dict` in a checkpoint: schedulers, loaders, the loss scale, the user's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from ..errors import CheckpointError
from ..optim import PreparedScheduler
from ..precision import Scaler
from .load import Reading, Trial, check_like, is_known
from .model_state import nothing
from .snapshot import Snapshot


class ObjectState:
    """The state of `thing` under `name`; of rank 0, unless it is each rank's `own`.

    Args:
        free: keys of the state that may hold something of another form each time, as a user's own objects do; True for all. The rest is
            compared with the live state before it is loaded.
    """

    def __init__(self, name: str, thing: Any, own: bool = False, free: bool | Collection[str] = ()) -> None:
        self.name, self._name, self._thing, self._own, self._free = name, f"state/{name}", thing, own, free

    def bring(self, into: Snapshot) -> None:
        if into.rank == 0 or self._own:
            into.add(self._name, self._thing.state_dict(), own=self._own)

    def take(self, source: Reading) -> Callable[[], None]:
        """Puts nothing into place later: a `load_state_dict` may fail, so it is a trial."""
        name = source.named(self._name, self._own)
        if name not in source:
            source.complain(f"the checkpoint has no {self._name}")
            return nothing
        state = source.state(name)
        before: list[Any] = []
        with suppress(Exception):  # a thing whose state cannot be had now may well take another
            before.append(copy.deepcopy(self._thing.state_dict()))
        if before and not isinstance(self._free, bool):
            check_like(
                self._name, state, {key: value for key, value in before[0].items() if key not in self._free}
            )

        def change() -> None:
            self._thing.load_state_dict(state)

        def undo() -> None:
            if not before:
                raise CheckpointError("what it was could not be copied")
            self._thing.load_state_dict(before.pop())

        source.trials.append(Trial(self._name, change, undo))
        return nothing


class ScaleState:
    """The loss scale, where there is one; from a checkpoint of a run without, it stays as it is."""

    def __init__(self, scaler: Scaler) -> None:
        self._scaler, self._inner = scaler, ObjectState("scaler", scaler)

    def bring(self, into: Snapshot) -> None:
        if self._scaler.scales:
            self._inner.bring(into)

    def take(self, source: Reading) -> Callable[[], None]:
        return self._inner.take(source) if "state/scaler" in source else nothing


class ScheduleState:
    """A scheduler's state, and how many updates of its optimizers it has not yet answered."""

    def __init__(self, name: str, scheduler: PreparedScheduler) -> None:
        self._name, self._scheduler = f"state/{name}/behind", scheduler
        self._inner = ObjectState(name, scheduler, free=not is_known(scheduler.scheduler) or ())

    def bring(self, into: Snapshot) -> None:
        self._inner.bring(into)
        if into.rank == 0:
            into.add(self._name, self._scheduler.behind)

    def take(self, source: Reading) -> Callable[[], None]:
        put = self._inner.take(source)
        if self._name not in source:
            return put
        behind = source.state(self._name)
        check_like(self._name, behind, self._scheduler.behind)

        def put_both() -> None:
            put()
            self._scheduler.behind = behind

        return put_both
