"""Trackers of a script's own: an object or class that keeps `easymp.protocols.Tracker`, or one written for Accelerate."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ..errors import SettingError
from ..logging import is_main
from .config import concise
from .rows import Row

F = TypeVar("F", bound=Callable[..., Any])


class Own:
    """A `Tracker` of the script's; one with `position` and `resume`, too, hears where a run goes on (see `ResumableTracker`)."""

    def __init__(self, name: str, given: Any) -> None:
        self.name, self.given = name, given
        self._running = False

    def start(self, run: str, config: Mapping[str, Any], position: Mapping[str, Any] | None) -> None:
        if position is not None:
            self.given.resume(position)
        if not self._running:
            self._begin(run, config)
            self._running = True

    def _begin(self, run: str, config: Mapping[str, Any]) -> None:
        self.given.start(run, config)

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.given.log(row.values, row.step, **row.options.get(self.name, {}))

    def position(self) -> dict[str, Any] | None:
        return dict(self.given.position()) if callable(getattr(self.given, "resume", None)) else None

    def finish(self) -> None:
        if self._running:
            self._running = False
            self.given.finish()


class Accelerates(Own):
    """One with the methods of Accelerate's GeneralTracker."""

    def _begin(self, run: str, config: Mapping[str, Any]) -> None:
        begin = getattr(self.given, "start", None)
        if begin is not None:
            begin()
        self.given.store_init_configuration(concise(config))

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.given.log(row.values, step=row.step, **row.options.get(self.name, {}))


def check_own(given: Any) -> str:
    """The name of a script's tracker.

    Raises:
        SettingError: it is none.
    """
    name = getattr(given, "name", None)
    theirs = callable(getattr(given, "store_init_configuration", None))
    methods = ("log", "finish") if theirs else ("start", "log", "finish")
    lacks = [method for method in methods if not callable(getattr(given, method, None))]
    if not isinstance(name, str) or not name.strip() or "," in name:
        lacks.insert(0, "name")
    if lacks:
        raise SettingError(
            f"log_with={given!r} is no tracker: it has no {' and no '.join(lacks)}. Pass a name such as 'jsonl', or an object with name, "
            "start(run, config), log(values, step) and finish()"
        )
    return str(name)


def adapted(name: str, given: Any, options: Mapping[str, Any]) -> Own:
    """What the logbook drives: `given`, or one made of it if it is a class, with `options`."""
    if isinstance(given, type):
        given = given(**options)
    elif options:
        raise SettingError(
            f"init_kwargs={{{name!r}: ...}}: this tracker is there already. Leave it out, or pass its class in log_with"
        )
    return (Accelerates if callable(getattr(given, "store_init_configuration", None)) else Own)(name, given)


class GeneralTracker:
    """What scripts for Accelerate derive their trackers from; `name`, `tracker`, and the methods that they need are theirs to say."""

    name = ""
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, _blank: bool = False) -> None:
        """Nothing."""

    def start(self) -> None:
        """Begin."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Hyperparameters: numbers, words and None by name."""

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        """One row."""

    def finish(self) -> None:
        """The run is over."""


def on_main_process(function: F) -> F:
    """A method that does nothing and returns None but on process 0; trackers in `log_with` are only called there in any case."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if is_main() else None

    return run  # type: ignore[return-value]
