"""Logging of a run: rows from any rank, which trackers on the main process keep; those of the script among them.

No call here is a collective. Rows wait for their numbers, and go to the trackers together, about once a second.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from ..base.lazy import imported
from ..base.rng import isolated
from ..errors import EasympError, SettingError, StepError, TrackerError, failing, nearest
from ..logging import get_logger, is_main
from ..options import ProjectConfiguration
from ..settings import Settings
from ..version import __version__
from . import TRACKERS, choose
from .rows import (
    FACTS,
    Pending,
    Row,
    checked_images,
    checked_step,
    checked_table,
    checked_values,
    concise,
    plain,
)

logger = get_logger(__name__)
F = TypeVar("F", bound=Callable[..., Any])
Options = Mapping[str, Mapping[str, Any]] | None  # a tracker's name → further arguments
EVERY = 1.0  # seconds that rows wait, while anything is logged or trained
MOST = 1000  # rows that wait


class Logbook:
    """The rows and trackers of one run. On other ranks than the main one, calls are checked and nothing is kept.

    Trackers start with the first rows that they get, or when one is asked for: by then a resumed run has loaded its checkpoint, so
    they know their positions.

    Args:
        run: the open run, with its plan.
        own: the script's trackers by lower-case name.
        prepared: its optimizers' updates count the steps.

    Attributes:
        names: the trackers that were asked for.
        run: the run's name.
        attached: further trackers by name, started already; they get rows and are left out of checkpoints.
        waiting: whether `poll` is to be called: rows or the error of a tracker wait, or someone listens.
    """

    def __init__(
        self, run: Any, project: ProjectConfiguration, asked: Settings, own: Mapping[str, Any], prepared: Any
    ) -> None:
        self._plan, self._project, self._optimizers = lambda: run.plan, project, prepared.optimizers
        self.names, self.own = choose(asked.log_with or "jsonl", asked.source("log_with")[1], own), own
        self._main = run.world.rank == 0
        keep = [name for name in self.names if name in own or not TRACKERS[name].watches]
        self._in_files = [name for name in keep if name in TRACKERS]
        self._kept = keep if self._main else []
        self._folder = Path(project.logging_dir or os.curdir)
        self.run, self._config, self._options = "log", {}, {}
        self._begun, self._calls = False, 0
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
        if self._main and len(keep) < len(self.names):
            console = imported(".console", __package__)
            self.attached["console"] = console.Console(run, prepared, self.listen)

    # -- calls of the Accelerator --------------------------------------------------------------------------------------

    def describe(self, project_name: str, config: Any, init_kwargs: Options) -> None:
        """Set the run's name, its hyperparameters, and further options of trackers."""
        good = isinstance(project_name, str) and project_name and ".." not in project_name
        if not good or Path(project_name).is_absolute():
            raise SettingError(f"init_trackers({project_name!r}): pass a name, which names files and folders")
        options = self.by_name(init_kwargs, "init_kwargs")
        self._check_place()
        if self._begun:
            words = "init_trackers() after log(): rows have been logged to another name. Call it first"
            raise StepError(words)
        if "console" in self.attached:
            self.attached["console"].configure(options.get("console", {}))
        self.run, self._config, self._options = project_name, {} if config is None else config, options

    def log(self, values: Mapping[str, Any], step: int | None, log_kwargs: Options) -> None:
        """Log numbers and words."""
        row, updates = checked_values(values), self._updates
        step = self._begin(step)
        self._calls += 1
        options = self.by_name(log_kwargs, "log_kwargs")
        for name in options:
            if name in TRACKERS and not TRACKERS[name].takes_options:
                raise SettingError(f"log_kwargs: {name} takes nothing beside values and step. Leave it out")
        if self._main and row and (self.names or self.attached):
            if not self._pending:
                self._since = time.monotonic()
            self._pending.add(Row(step, time.time(), row, options, updates))
            self.waiting = True
            self.poll()

    def log_images(self, name: str, images: Any, step: int | None) -> None:
        """Log images."""
        step = self._begin(step, f"log_images({name!r})", name)
        array, changed = checked_images(images, convert=self._main)
        if self._main:
            if changed:
                self._say(f"log_images({name!r}): {changed}. Undo a normalisation before, or pass uint8")
            self._show("log_images", {name: array}, step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Iterable[Any], step: int | None) -> None:
        """Log a table."""
        step = self._begin(step, f"log_table({name!r})", name)
        names, data = checked_table(columns, rows)
        if self._main:
            self._show("log_table", name, columns=names, data=data, step=step)

    def get(self, name: str, unwrap: bool) -> Any:
        """The tracker of this name; with `unwrap` its library's object."""
        self._check_name(name, "get_tracker")
        self._check_place()
        if not self._main:
            return SILENT
        tracker = {**self.attached, **self.trackers}.get(name.lower())
        if tracker is None:
            raise TrackerError(
                f"get_tracker: {name!r} could not start, as an earlier error said: correct that, or leave it out"
            )
        return getattr(tracker, "tracker", tracker) if unwrap else tracker

    def all(self) -> list[Any]:
        """The trackers that were asked for."""
        self._check_place()
        return [*self.trackers.values(), *(one for name, one in self.attached.items() if name in TRACKERS)]

    def by_name(self, options: Options, where: str) -> dict[str, Mapping[str, Any]]:
        """`options`, by names of this run's trackers in lower case."""
        for name in options or ():
            self._check_name(name, where)
        return {name.lower(): given for name, given in (options or {}).items()}

    def check_open(self, call: str) -> None:
        """Refuse `call` after the end of the run."""
        if self._over:
            raise StepError(f"{call}() after end_training(): the trackers have finished. Log before it")

    @property
    def _updates(self) -> int:
        """Updates of the optimizers, or calls of `log` where there is none."""
        return max((optimizer.updates for optimizer in self._optimizers), default=self._calls)

    def _begin(self, step: int | None, call: str = "log()", name: str = "values") -> int:
        self.check_open(call.partition("(")[0])
        if not isinstance(name, str) or not name:
            raise SettingError(f"{call}: pass a name, such as 'predictions'")
        if not self._begun:
            self._check_place()
        step = checked_step(self._updates if step is None else step)
        self._begun = True
        return step

    def _check_place(self) -> None:
        place = self._project.logging_dir or ""
        if "://" in place and self._in_files:
            raise SettingError(
                f"{self._in_files[0]} writes to a local folder, and the project is at {place}: pass "
                "ProjectConfiguration(project_dir=..., logging_dir='a/local/folder'), or log_with='none'"
            )

    def _check_name(self, name: str, where: str) -> None:
        if not isinstance(name, str) or name.lower() not in self.names:
            near = nearest(str(name), self.names) or "."
            raise SettingError(
                f"{where}: {name!r} is not a tracker of this run{near} It has: {', '.join(self.names) or 'none'}"
            )

    # -- rows ----------------------------------------------------------------------------------------------------------

    def listen(self, hear: Callable[[Tensor, Any], None] | None) -> None:
        """Call `hear` with each loss before its backward, and its number of items or None, from now on; None: no longer."""
        self._hear = hear
        self.waiting = bool(self._pending) or self._failure is not None or hear is not None

    def poll(self, loss: Tensor | None = None, items: Any = None) -> None:
        """Hand over the rows that are due and have arrived; `loss` and `items` are of the backward that begins. Waits for no device."""
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

    def _show(self, method: str, *args: Any, **named: Any) -> None:
        """Hand over all rows, then call `method` of the trackers that have it."""
        self.settle()
        for name, tracker in {**self.attached, **self._started()}.items():
            act = getattr(tracker, method, None)
            if act is not None:
                self.attempt(name, partial(act, *args, **named))
            elif name in self.names:
                what = method.removeprefix("log_").removesuffix("s") + "s"
                self._say(f"tracker {name} has no {method}(): it does not keep the {what} of this run")

    def _say(self, words: str) -> None:
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

    # -- the trackers --------------------------------------------------------------------------------------------------

    @property
    def trackers(self) -> dict[str, Any]:
        """The started trackers by name; for the script's own ones its objects."""
        found = {name: t.given if name in self.own else t for name, t in self._started().items()}
        self._complain()
        return found

    def _started(self) -> dict[str, Any]:
        if self._trackers is None:
            self._trackers = {}
            for name in self._kept:
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
        return getattr(imported(f".{name}", __package__), TRACKERS[name].kind)(self._folder, options)

    def _start(self, name: str, tracker: Any) -> Any:
        plan = self._plan()
        facts = {"plan": plan.as_dict(), "machine": dataclasses.asdict(plan.hardware)}
        config = {**plain(self._config), FACTS: plain({"version": __version__, **facts})}
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


# -- trackers of the script: objects or classes that follow `easymp.protocols.Tracker` or Accelerate's GeneralTracker


class Own:
    """Drives a tracker of the script, or one of its class, made with `options`; one with `resume` continues (see `ResumableTracker`)."""

    def __init__(self, name: str, given: Any, options: Mapping[str, Any]) -> None:
        if isinstance(given, type):
            given = given(**options)
        elif options:
            raise SettingError(
                f"init_kwargs={{{name!r}: ...}}: this tracker exists already. Leave the options out, or pass its class in log_with"
            )
        self.name, self.given = name, given
        self._running, self._accelerates = False, _is_accelerates(given)
        # Accelerator.log of compat calls it, with what the script passed.
        self._as_given = getattr(given, "as_given", False)

    def start(self, run: str, config: Mapping[str, Any], position: Mapping[str, Any] | None) -> None:
        if position is not None:
            self.given.resume(position)
        if self._running:
            return
        if not self._accelerates:
            self.given.start(run, config)
        else:
            if hasattr(self.given, "start"):
                self.given.start()
            if not self._as_given:
                self.given.store_init_configuration(concise(config))
            elif asked := {name: value for name, value in config.items() if name != FACTS}:
                self.given.store_init_configuration(asked)
        self._running = True

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows if not self._as_given else ():
            options = row.options.get(self.name, {})
            if self._accelerates:
                self.given.log(row.values, step=row.step, **options)
            else:
                self.given.log(row.values, row.step, **options)

    def __getattr__(self, name: str) -> Any:
        """`log_images` and `log_table`, if the tracker has them."""
        if name in ("log_images", "log_table"):
            return getattr(self.given, name)
        raise AttributeError(name)

    def position(self) -> dict[str, Any] | None:
        return dict(self.given.position()) if callable(getattr(self.given, "resume", None)) else None

    def finish(self) -> None:
        if self._running:
            self._running = False
            self.given.finish()


def _is_accelerates(given: Any) -> bool:
    return callable(getattr(given, "store_init_configuration", None))


def check_own(given: Any) -> str:
    """The name of a tracker of the script; SettingError if it lacks a name or a method."""
    name = getattr(given, "name", None)
    methods = ("log", "finish") if _is_accelerates(given) else ("start", "log", "finish")
    lacks = [method for method in methods if not callable(getattr(given, method, None))]
    if not isinstance(name, str) or not name.strip() or "," in name:
        lacks.insert(0, "name")
    if lacks:
        raise SettingError(
            f"log_with={given!r} is not a tracker: it has no {' and no '.join(lacks)}. Pass a name such as 'jsonl', or an object with "
            "name, start(run, config), log(values, step) and finish()"
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
    """Make a method do nothing and return None except on process 0, where trackers in `log_with` are called in any case."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if is_main() else None

    return run  # type: ignore[return-value]


class Silent:
    """Stands for a tracker on other ranks than the main one: every attribute, item and call returns this object again."""

    def __getattr__(self, name: str) -> Silent:
        if name.startswith("__"):  # copy and pickle look for their hooks
            raise AttributeError(name)
        return self

    def _itself(self, *_: Any, **__: Any) -> Silent:
        return self

    def _ignore(self, *_: Any) -> None:
        """Do nothing."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False

    __call__ = __getitem__ = __enter__ = _itself
    __exit__ = __setitem__ = __setattr__ = _ignore


SILENT = Silent()
