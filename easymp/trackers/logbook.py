"""The main process's logged rows: they wait for their numbers, then go to the trackers, about once a second."""

from __future__ import annotations

import atexit
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ..base.rng import isolated
from ..errors import EasympError, TrackerError, failing
from ..logging import get_logger
from . import TRACKERS
from .own import Own
from .rows import FACTS, Pending, Row, plain

logger = get_logger(__name__)
EVERY = 1.0  # seconds that rows wait, while anything is logged or trained
MOST = 1000  # rows that wait


class Logbook:
    """Rows and trackers of one run, on the main process.

    Trackers start with the first rows that they get, or when one is asked for: by then a resumed run has loaded its checkpoint, so
    they know their positions.

    Args:
        names: the trackers' names.
        own: the script's trackers by lower-case name.
        folder: the folder of their files.
        facts: returns the plan and the machine, which are logged beside the script's hyperparameters.

    Attributes:
        attached: further trackers by name, started already; they get rows and are left out of checkpoints.
        waiting: whether `poll` is to be called: rows or the error of a tracker wait, or someone listens.
    """

    def __init__(
        self,
        names: Sequence[str],
        own: Mapping[str, Any],
        folder: Path,
        facts: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._names, self.own, self._folder, self._facts = names, own, folder, facts
        self.run, self._config, self._options = "log", {}, {}
        self._pending, self._since = Pending(), 0.0
        self._trackers: dict[str, Any] | None = None  # from their start on
        self._failure: EasympError | None = None  # a tracker's failed start, until it is raised
        self.attached: dict[str, Any] = {}
        self._loaded: dict[str, Any] | None = None
        self._said: set[str] = set()
        self._lost: dict[str, int] = {}
        self._over = False
        self._hear: Callable[[Tensor, Any], None] | None = None
        self.waiting = False

    def describe(self, run: str, config: Any, options: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the run's name, its hyperparameters, and by a tracker's name further options."""
        self.run, self._config, self._options = run, config, options

    def listen(self, hear: Callable[[Tensor, Any], None] | None) -> None:
        """Call `hear` with each loss before its backward, and its number of items or None, from now on; None: no longer."""
        self._hear = hear
        self.waiting = bool(self._pending) or self._failure is not None or hear is not None

    @property
    def trackers(self) -> dict[str, Any]:
        """The started trackers by name; for the script's own ones its objects."""
        found = {name: t.given if name in self.own else t for name, t in self._started().items()}
        self._complain()
        return found

    # -- rows ---------------------------------------------------------------------------------------------------------

    def log(self, row: Row) -> None:
        if not self._pending:
            self._since = time.monotonic()
        self._pending.add(row)
        self.waiting = True
        self.poll()

    def poll(self, loss: Tensor | None = None, items: Any = None) -> None:
        """Hand over the rows that are due and have arrived. Waits for no device.

        Args:
            loss, items: of the backward that begins, where one does.
        """
        if self._hear is not None and loss is not None:
            self._hear(loss, items)
            if not self._pending and self._failure is None:
                return
        now = time.monotonic()
        if now - self._since >= EVERY or len(self._pending) >= MOST:
            self._since = now
            self._pending.send()
        self._hand_over(self._pending.arrived())
        self._complain()

    def settle(self) -> None:
        """Hand over all rows."""
        self._pending.send()
        self._hand_over(self._pending.arrived(wait=True))

    def _hand_over(self, rows: list[Row]) -> None:
        self.listen(self._hear)
        if rows:
            for name, tracker in (*self._started().items(), *self.attached.items()):
                self.attempt(name, partial(tracker.write, rows), len(rows))

    def show(self, names: Sequence[str], method: str, *args: Any, **named: Any) -> None:
        """Hand over all rows, then call `method` of the trackers that have it."""
        self.settle()
        for name, tracker in {**self.attached, **self._started()}.items():
            act = getattr(tracker, method, None)
            if act is not None:
                self.attempt(name, partial(act, *args, **named))
            elif name in names:
                what = method.removeprefix("log_").removesuffix("s") + "s"
                self.say(f"tracker {name} has no {method}(): it does not keep the {what} of this run")

    def say(self, words: str) -> None:
        """Warn once."""
        if words not in self._said:
            self._said.add(words)
            logger.warning("%s", words)

    def attempt(self, name: str, act: Callable[[], Any], rows: int = 0) -> Any:
        """Return the result of `act`. An error of a tracker is logged and does not end the training."""
        try:
            return act()
        except Exception as error:
            self._lost[name] = self._lost.get(name, 0) + rows
            words = f"tracker {name}: {type(error).__name__}: {error}"
            if words not in self._said:
                self._said.add(words)
                lost = f", {rows} rows are not kept there" if rows else ""
                logger.error("%s; the training goes on%s", words, lost)
            return None

    # -- the run ------------------------------------------------------------------------------------------------------

    def _started(self) -> dict[str, Any]:
        if self._trackers is None:
            self._trackers = {}
            for name in self._names:
                try:
                    self._trackers[name] = self._start(name, self._create(name))
                except EasympError as error:  # raised once the other trackers have their rows
                    self._failure, self.waiting = error, True
            # Registered last, so that it runs before what trackers registered, such as wandb's own end.
            atexit.register(self.finish)
        return self._trackers

    def _complain(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _create(self, name: str) -> Any:
        options = self._options.get(name, {})
        if name in self.own:
            return Own(name, self.own[name], options)
        module = importlib.import_module(f".{name}", __package__)
        return getattr(module, TRACKERS[name].kind)(self._folder, options)

    def _start(self, name: str, tracker: Any) -> Any:
        config = {**plain(self._config), FACTS: plain(self._facts())}
        try:
            with isolated():  # packages draw random numbers at import, and for names of runs
                tracker.start(self.run, config, self._positions.get(name))
        except EasympError:
            raise
        except Exception as error:
            raise TrackerError(
                f"tracker {name} could not start: {type(error).__name__}: {error}. Correct that, or leave it out of log_with"
            ) from error
        return tracker

    @property
    def _positions(self) -> Mapping[str, Any]:
        """The trackers' positions at the loaded checkpoint, if its run has this name."""
        loaded = self._loaded
        return loaded["positions"] if loaded is not None and loaded["run"] == self.run else {}

    def state_dict(self) -> dict[str, Any] | None:
        """The position of each tracker, with all rows handed over; None if nothing was logged, in this run or before."""
        if not self.waiting and self._trackers is None:
            return self._loaded
        self.settle()
        positions = {name: self.attempt(name, tracker.position) for name, tracker in self._started().items()}
        known = {name: position for name, position in positions.items() if position is not None}
        return {"run": self.run, "positions": {**self._positions, **known}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the run of a checkpoint."""
        self._loaded = state
        if self._trackers is None:
            return
        self.settle()
        for name, tracker in self._trackers.items():
            if name in self._positions:
                self.attempt(name, partial(self._start, name, tracker))

    def finish(self) -> None:
        """End the run; raise the error of a tracker that could not start, unless the run ends by another error."""
        if self._over:
            return
        self._over = True
        atexit.unregister(self.finish)
        try:
            self.settle()
        except Exception as error:  # of a device; the trackers still have to finish
            logger.error("the last rows are lost: %s: %s", type(error).__name__, error)
        for name, tracker in (*(self._trackers or {}).items(), *self.attached.items()):
            self.attempt(name, tracker.finish)
        for name, rows in self._lost.items():
            if rows:
                logger.error("tracker %s: %d rows were not kept", name, rows)
        if self._failure is not None and failing():
            logger.error("%s", self._failure)
        else:
            self._complain()
