"""Logging of a run: rows from any rank, which trackers on the main process keep; those of the script among them.

No call here is a collective. Rows wait for their numbers, and go to the trackers together, about once a second.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..base import env
from ..base.lazy import imported
from ..base.parts import Part
from ..base.rng import isolated
from ..distributed.processes import run_where
from ..errors import EasympError, SettingError, StepError, TrackerError, failing, nearest
from ..logging import get_logger, is_main
from ..options import ProjectConfiguration
from ..settings import Settings
from ..version import __version__
from . import TRACKERS, choose
from .rows import FACTS, Pending, Row, checked_images, checked_step, checked_table, checked_values, concise, plain

logger = get_logger(__name__)
F = TypeVar("F", bound=Callable[..., Any])
Options = Mapping[str, Mapping[str, Any]] | None  # a tracker's name → further arguments
EVERY = 1.0  # seconds that rows wait, while anything is logged or trained
MOST = 1000  # rows that wait


class Logbook(Part):
    """The rows and trackers of one run. On other ranks than the main one, calls are checked and nothing is kept.

    Trackers start with the first rows that they get, or when one is asked for: by then a resumed run has loaded its
    checkpoint, so they know their positions.

    Attributes:
        names: the trackers that were asked for.
        script_trackers: the script's own ones by lower-case name.
        run_name: names the run's files.
    """

    name = "tracking"

    def __init__(
        self, run: Any, project: ProjectConfiguration, settings: Settings, script_trackers: Mapping[str, Any]
    ) -> None:
        self._project, self._optimizers = project, run.prepared.optimizers
        self.script_trackers = script_trackers
        self.names = choose(settings.log_with or "jsonl", settings.source("log_with")[1], script_trackers)
        self._main = run.world.rank == 0
        keeping = [name for name in self.names if name in script_trackers or TRACKERS[name].kind]
        self._in_files = [name for name in keeping if name in TRACKERS]
        self._names_with_rows = keeping if self._main else []
        self._folder = Path(project.logging_dir or os.curdir)
        self.run_name, self._config = "log", dict[str, Any]()
        self._options: dict[str, Mapping[str, Any]] = {}
        self._has_logged, self._has_ended = False, False
        self._calls = 0
        self._pending, self._since = Pending(), 0.0
        self._trackers: dict[str, Any] | None = None  # from their start on
        self._failure: EasympError | None = None  # a tracker's failed start, until it is raised
        # Parts that show the rows, by name: started already, and left out of checkpoints.
        self._watching = {name: run.parts.get(name) for name in self.names if self._main and name not in keeping}
        self._loaded: dict[str, Any] | None = None
        self._reported: set[str] = set()
        self._lost_rows: dict[str, int] = {}

    # -- calls of the Accelerator

    def describe(self, project_name: str, config: Any, init_kwargs: Options) -> None:
        """Set the run's name, its hyperparameters, and further options of trackers."""
        is_name = isinstance(project_name, str) and project_name and ".." not in project_name
        if not is_name or Path(project_name).is_absolute():
            raise SettingError(f"init_trackers({project_name!r}): pass a name, which names files and folders")
        options = self.by_name(init_kwargs, "init_kwargs")
        self._check_folder()
        if self._has_logged:
            raise StepError("init_trackers() after log(): rows have been logged to another name. Call it first")
        for name, part in self._watching.items():
            part.configure(options.get(name, {}))
        self.run_name, self._options = project_name, options
        self._config = {} if config is None else config

    def log(self, values: Mapping[str, Any], step: int | None, log_kwargs: Options) -> None:
        row, updates = checked_values(values), self._updates
        step = self._begin(step)
        self._calls += 1
        options = self.by_name(log_kwargs, "log_kwargs")
        for name in options:
            if name in TRACKERS and not TRACKERS[name].takes_options:
                raise SettingError(f"log_kwargs: {name} takes nothing beside values and step. Leave it out")
        if self._main and row and (self.names or self.run.parts.rows):
            if not self._pending:
                self._since = time.monotonic()
            self._pending.add(Row(step, time.time(), row, options, updates))
            self.poll()

    def log_images(self, name: str, images: Any, step: int | None) -> None:
        step = self._begin(step, f"log_images({name!r})", name)
        array, changes = checked_images(images, convert=self._main)
        if self._main:
            if changes:
                message = f"log_images({name!r}): {changes}. Undo a normalisation before, or pass uint8"
                self._log_once(logging.WARNING, message)
            self._show("log_images", {name: array}, step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Iterable[Any], step: int | None) -> None:
        step = self._begin(step, f"log_table({name!r})", name)
        names, data = checked_table(columns, rows)
        if self._main:
            self._show("log_table", name, columns=names, data=data, step=step)

    def get(self, name: str, unwrap: bool) -> Any:
        """The tracker of this name; with `unwrap` its library's object."""
        self._check_name(name, "get_tracker")
        self._check_folder()
        if not self._main:
            return SILENT
        tracker = {**self._watching, **self.trackers}.get(name.lower())
        if tracker is None:
            reason = "could not start, as an earlier error said: correct that, or leave it out"
            raise TrackerError(f"get_tracker: {name!r} {reason}")
        return getattr(tracker, "tracker", tracker) if unwrap else tracker

    def all(self) -> list[Any]:
        """The trackers that were asked for."""
        self._check_folder()
        return [*self.trackers.values(), *self._watching.values()]

    def by_name(self, options: Options, argument: str) -> dict[str, Mapping[str, Any]]:
        """`options`, by names of this run's trackers in lower case."""
        for name in options or ():
            self._check_name(name, argument)
        return {name.lower(): tracker_options for name, tracker_options in (options or {}).items()}

    def check_open(self, call: str) -> None:
        """Refuse `call` after the end of the run."""
        if self._has_ended:
            raise StepError(f"{call}() after end_training(): the trackers have finished. Log before it")

    @property
    def _updates(self) -> int:
        """Updates of the optimizers, or calls of `log` where there is none."""
        return max((optimizer.updates for optimizer in self._optimizers), default=self._calls)

    def _begin(self, step: int | None, call: str = "log()", name: str = "values") -> int:
        self.check_open(call.partition("(")[0])
        if not isinstance(name, str) or not name:
            raise SettingError(f"{call}: pass a name, such as 'predictions'")
        if not self._has_logged:
            self._check_folder()
            self.run.parts.begin_again(self, "stepped", "saving")
        step = checked_step(self._updates if step is None else step)
        self._has_logged = True
        return step

    def _check_folder(self) -> None:
        folder = self._project.logging_dir or ""
        if "://" in folder and self._in_files:
            raise SettingError(
                f"{self._in_files[0]} writes to a local folder, and the project is at {folder}: pass "
                "ProjectConfiguration(project_dir=..., logging_dir='a/local/folder'), or log_with='none'"
            )

    def _check_name(self, name: str, argument: str) -> None:
        if not isinstance(name, str) or name.lower() not in self.names:
            suggestion, names = nearest(str(name), self.names) or ".", ", ".join(self.names) or "none"
            raise SettingError(f"{argument}: {name!r} is not a tracker of this run{suggestion} It has: {names}")

    # -- rows ----------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.run.parts.end(self, "stepped", "saving")  # until something is logged

    def stepped(self, optimizer: Any) -> None:
        if self._pending or self._failure is not None:
            self.poll()

    def saving(self, call: str, path: str | None) -> None:
        if call == "save_state":
            self.settle_rows()  # before the save begins: trackers may take long to start

    def poll(self) -> None:
        """Hand over the rows that are due and have arrived. Waits for no device."""
        time_now = time.monotonic()
        if time_now - self._since >= EVERY or len(self._pending) >= MOST:
            self._since = time_now
            self._pending.send()
        self._hand_over(self._pending.arrived())
        self._complain()

    def settle_rows(self) -> None:
        """Hand over all rows, and wait for the device."""
        self._pending.send()
        self._hand_over(self._pending.arrived(wait=True))

    def _hand_over(self, rows: list[Row]) -> None:
        if rows:
            for name, tracker in self._started().items():
                self.attempt(name, partial(tracker.write, rows), len(rows))
            for notify in self.run.parts.rows:
                self.attempt(notify.__self__.name, partial(notify, rows), len(rows))

    def _show(self, method: str, *args: Any, **keywords: Any) -> None:
        """Hand over all rows, then call `method` of the trackers that have it."""
        self.settle_rows()
        for name, tracker in {**self._watching, **self._started()}.items():
            act = getattr(getattr(tracker, "wrapped", tracker), method, None)
            if act is not None:
                self.attempt(name, partial(act, *args, **keywords))
            elif name in self.names:
                items = method.removeprefix("log_").removesuffix("s") + "s"
                message = f"tracker {name} has no {method}(): it does not keep the {items} of this run"
                self._log_once(logging.WARNING, message)

    def _log_once(self, level: int, message: str, consequence: str = "") -> None:
        if message not in self._reported:
            self._reported.add(message)
            logger.log(level, "%s%s", message, consequence)

    def attempt(self, name: str, act: Callable[[], Any], rows: int = 0) -> Any:
        """Return the result of `act`. An error of a tracker is logged and does not end the training."""
        try:
            return act()
        except Exception as error:
            self._lost_rows[name] = self._lost_rows.get(name, 0) + rows
            consequence = "; the training goes on" + (f", {rows} rows are not kept there" if rows else "")
            self._log_once(logging.ERROR, f"tracker {name}: {type(error).__name__}: {error}", consequence)
            return None

    # -- the trackers --------------------------------------------------------------------------------------------------

    @property
    def trackers(self) -> dict[str, Any]:
        """The started trackers by name. A tracker of the script is the object that the script passed."""
        trackers = {name: getattr(tracker, "wrapped", tracker) for name, tracker in self._started().items()}
        self._complain()
        return trackers

    def _started(self) -> dict[str, Any]:
        if self._trackers is None:
            self._trackers = {}
            for name in self._names_with_rows:
                options = self._options.get(name, {})
                try:
                    if name in self.script_trackers:
                        tracker: Any = ScriptTracker(name, self.script_trackers[name], options)
                    else:
                        kind = getattr(imported(".writers", __package__), TRACKERS[name].kind)
                        tracker = kind(self._folder, options)
                    self._trackers[name] = self._start(name, tracker)
                except EasympError as error:  # raised once the other trackers have their rows
                    self._failure = error
            # Registered last, so that it runs before what trackers registered, such as wandb's own end.
            atexit.register(self.close)
        return self._trackers

    def _complain(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _start(self, name: str, tracker: Any) -> Any:
        plan = self.run.plan
        facts = {"script": env.script(), "plan": plan.as_dict(), "machine": dataclasses.asdict(plan.hardware)}
        config = {**plain(self._config), FACTS: plain({"version": __version__, **facts})}
        try:
            with isolated():  # packages draw random numbers at import, and for names of runs
                tracker.start(self.run_name, config, self._positions.get(name))
        except EasympError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}. Correct that, or leave it out of log_with"
            raise TrackerError(f"tracker {name} could not start: {reason}") from error
        return tracker

    @property
    def _positions(self) -> Mapping[str, Any]:
        """The trackers' positions at the loaded checkpoint, if its run has this name."""
        loaded = self._loaded
        return loaded["positions"] if loaded is not None and loaded["run"] == self.run_name else {}

    def state(self) -> dict[str, Any] | None:
        """The position of each tracker after all rows; None if nothing was logged, in this run or before."""
        if self._failure is None and self._trackers is None and not (self._has_logged and self._pending):
            return self._loaded
        self.settle_rows()
        positions = {name: self.attempt(name, tracker.position) for name, tracker in self._started().items()}
        known_positions = {name: position for name, position in positions.items() if position is not None}
        return {"run": self.run_name, "positions": {**self._positions, **known_positions}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue the run of a checkpoint."""
        self._loaded = dict(state)
        if self._trackers is not None:
            self.settle_rows()
            for name in self._trackers.keys() & self._positions.keys():
                self.attempt(name, partial(self._start, name, self._trackers[name]))

    def close(self) -> None:
        """End the run; raise the error of a tracker that could not start, unless the run ends by another error."""
        if self._has_ended:
            return
        self._has_ended = True
        atexit.unregister(self.close)
        try:
            self.settle_rows()
        except Exception as error:  # of a device; the trackers still have to finish
            logger.error("the last rows are lost: %s: %s", type(error).__name__, error)
        for name, tracker in (self._trackers or {}).items():
            self.attempt(name, tracker.finish)
        for name, rows in self._lost_rows.items():
            if rows:
                logger.error("tracker %s: %d rows were not kept", name, rows)
        if self._failure is not None and failing():
            logger.error("%s", self._failure)
        else:
            self._complain()


# -- trackers of the script: objects or classes that follow `easymp.protocols.Tracker` or Accelerate's GeneralTracker


class ScriptTracker:
    """Drives a tracker of the script: an object, or a class, which is called with `options`."""

    def __init__(self, name: str, tracker: Any, options: Mapping[str, Any]) -> None:
        if isinstance(tracker, type):
            tracker = tracker(**options)
        elif options:
            remedy = "Leave the options out, or pass its class in log_with"
            raise SettingError(f"init_kwargs={{{name!r}: ...}}: this tracker exists already. {remedy}")
        self.name, self.wrapped = name, tracker
        self._running, self._accelerates = False, _is_accelerates(tracker)
        self._as_given = getattr(tracker, "as_given", False)  # compat's Accelerator.log calls it, as the script does

    def start(self, run: str, config: Mapping[str, Any], position: Mapping[str, Any] | None) -> None:
        if position is not None:
            self.wrapped.resume(position)
        if self._running:
            return
        self._running = True
        if not self._accelerates:
            self.wrapped.start(run, config)
            return
        getattr(self.wrapped, "start", lambda: None)()
        hyperparameters = {name: value for name, value in config.items() if name != FACTS}
        if not self._as_given or hyperparameters:
            self.wrapped.store_init_configuration(hyperparameters if self._as_given else concise(config))

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows if not self._as_given else ():
            options = row.options.get(self.name, {})
            if self._accelerates:
                self.wrapped.log(row.values, step=row.step, **options)
            else:
                self.wrapped.log(row.values, row.step, **options)

    def position(self) -> dict[str, Any] | None:
        return dict(self.wrapped.position()) if callable(getattr(self.wrapped, "resume", None)) else None

    def finish(self) -> None:
        if self._running:
            self._running = False
            self.wrapped.finish()


def _is_accelerates(tracker: Any) -> bool:
    return callable(getattr(tracker, "store_init_configuration", None))


def check_own(tracker: Any) -> str:
    """The name of a tracker of the script; SettingError if it lacks a name or a method."""
    name = getattr(tracker, "name", None)
    methods = ("log", "finish") if _is_accelerates(tracker) else ("start", "log", "finish")
    lacks = [method for method in methods if not callable(getattr(tracker, method, None))]
    if not isinstance(name, str) or not name.strip() or "," in name:
        lacks.insert(0, "name")
    if lacks:
        raise SettingError(
            f"log_with={tracker!r} is not a tracker: it has no {' and no '.join(lacks)}. Pass a name such as 'jsonl', "
            "or an object with name, start(run, config), log(values, step) and finish()"
        )
    return str(name)


class GeneralTracker:
    """Base class for trackers written for Accelerate. Subclasses set `name` and define the methods that they need.

    Args:
        _blank: ignored, as in Accelerate.

    Example:
        >>> class Printer(GeneralTracker):
        ...     name = "printer"
        ...     def log(self, values, step=None, **options):
        ...         print(step, values)
        >>> acc = Accelerator(cpu=True, log_with=Printer())
        >>> acc.log({"loss": 0.5}, step=1)
        >>> acc.end_training()  # calls .start(), .store_init_configuration(...), .log(...) and .finish()
        1 {'loss': 0.5}
    """

    name = ""
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, _blank: bool = False) -> None:
        """Do nothing."""

    def start(self) -> None:
        """Begin the run."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the hyperparameters.

        Args:
            values: numbers, words and None by name.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        """Keep one row.

        Args:
            values: numbers and words by name.
            step: the script's, or the number of optimizer updates.
            options: this tracker's part of ``Accelerator.log(log_kwargs=...)``.
        """

    def finish(self) -> None:
        """End the run."""


def on_main_process(function: F) -> F:
    """Make a method do nothing and return None except on process 0, the only one that calls trackers in `log_with`."""
    return run_where(is_main, function)  # type: ignore[return-value]


class Silent:
    """Stands for a tracker on other ranks than the main one: attributes, items and calls return it again."""

    def __getattr__(self, name: str) -> Silent:
        if name.startswith("__"):  # copy and pickle look for their hooks
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Silent:
        return self

    def __setitem__(self, *_: Any) -> None:
        """Do nothing."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False

    __getitem__ = __enter__ = __call__
    __exit__ = __setattr__ = __setitem__


SILENT = Silent()
