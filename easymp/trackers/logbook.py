"""What the main process does with logged rows: they wait for their numbers, then go to the trackers, about once a second."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import EasympError, TrackerError
from ..log import get_logger
from . import TRACKERS
from .config import plain
from .pending import Pending
from .rows import Row

logger = get_logger(__name__)
EVERY = 1.0  # seconds that rows wait, while anything is logged or trained
MOST = 1000  # rows that wait


class Logbook:
    """Rows and trackers of one run, on the main process.

    Trackers start with the first rows that they get, or when one is asked for: a run that is resumed has loaded its checkpoint by
    then, and they know that they go on.

    Args:
        names: of the trackers.
        folder: where files go.
        facts: what is logged with the script's own hyperparameters.
    """

    def __init__(self, names: Sequence[str], folder: Path, facts: Callable[[], Mapping[str, Any]]) -> None:
        self._names, self._folder, self._facts = names, folder, facts
        self.run, self._config, self._options = "log", {}, {}
        self._pending = Pending()
        self._trackers: list[Any] | None = None
        self._loaded: dict[str, Any] | None = None
        self._since: float | None = None
        self._said: set[str] = set()
        self._lost: dict[str, int] = {}
        self._over = False
        self.waiting = False  # whether rows are here that no tracker has got

    def describe(self, run: str, config: Any, options: Mapping[str, Mapping[str, Any]]) -> None:
        """The run's name, hyperparameters, and by a tracker's name what it takes more."""
        self.run, self._config, self._options = run, config, options

    @property
    def trackers(self) -> list[Any]:
        """The trackers, started."""
        return self._started()

    @property
    def begun(self) -> bool:
        return self._trackers is not None

    # -- rows ---------------------------------------------------------------------------------------------------------

    def log(self, row: Row) -> None:
        self._pending.add(row)
        self.waiting = True
        if self._since is None:
            self._since = time.monotonic()
        self.poll()

    def poll(self) -> None:
        """Hand over what is due and has arrived. Waits for no device."""
        assert self._since is not None
        now = time.monotonic()
        if now - self._since >= EVERY or len(self._pending) >= MOST:
            self._since = now
            self._pending.send()
        self._hand_over(self._pending.arrived())

    def settle(self) -> None:
        """Hand over everything."""
        self._pending.send()
        self._hand_over(self._pending.arrived(wait=True))

    def _hand_over(self, rows: list[Row]) -> None:
        if not rows:
            return
        self.waiting = bool(self._pending)
        for tracker in self._started():
            self._try(tracker, lambda tracker=tracker: tracker.write(rows), len(rows))

    def _try(self, tracker: Any, act: Callable[[], Any], rows: int = 0) -> Any:
        """What `act` returns. What a tracker meets with is said and does not end the training."""
        try:
            return act()
        except Exception as error:
            self._lost[tracker.name] = self._lost.get(tracker.name, 0) + rows
            words = f"tracker {tracker.name}: {type(error).__name__}: {error}"
            if words not in self._said:
                self._said.add(words)
                logger.error("%s; the training goes on%s", words, f", {rows} rows are not kept there" if rows else "")
            return None

    # -- the run ------------------------------------------------------------------------------------------------------

    def _started(self) -> list[Any]:
        if self._trackers is None:
            self._trackers = []  # one that fails is not tried again
            for name in self._names:
                home, kind = TRACKERS[name]
                made = getattr(importlib.import_module(f".{home}", __package__), kind)(self._folder, self._options.get(name, {}))
                self._start(made)
                self._trackers.append(made)
        return self._trackers

    def _start(self, tracker: Any) -> None:
        loaded = self._loaded if self._loaded is not None and self._loaded["run"] == self.run else None
        config = {**plain(self._config), "easymp": plain(self._facts())}
        try:
            tracker.start(self.run, config, loaded["positions"].get(tracker.name) if loaded else None)
        except EasympError:
            raise
        except Exception as error:
            raise TrackerError(
                f"tracker {tracker.name} could not start: {type(error).__name__}: {error}. Correct that, or leave it out of log_with"
            ) from error

    def state_dict(self) -> dict[str, Any] | None:
        """Where each tracker stands, with all rows handed over; None where nothing was logged, in this run or those before."""
        if not self.waiting and self._trackers is None:
            return self._loaded
        self.settle()
        positions = {t.name: self._try(t, t.position) for t in self._started()}
        return {"run": self.run, "positions": {name: where for name, where in positions.items() if where is not None}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The run of a checkpoint goes on."""
        self._loaded = state
        if self._trackers is not None:
            self.settle()
            for tracker in self._trackers:
                tracker.finish()
                self._start(tracker)

    def finish(self) -> None:
        """The run is over. Raises nothing: what else ends with it must not be kept from that."""
        if self._over:
            return
        self._over = True
        try:
            self.settle()
        except Exception as error:
            logger.error("%s", error)
        for tracker in self._trackers or ():
            self._try(tracker, tracker.finish)
        for name, rows in self._lost.items():
            if rows:
                logger.error("tracker %s: %d rows were not kept", name, rows)
