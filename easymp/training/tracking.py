"""What an Accelerator does about logging: `log` on any rank, kept by trackers on the main process. No call here is a collective."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import trackers
from ..errors import SettingError, StepError, TrackerError, nearest
from ..version import __version__

if TYPE_CHECKING:
    from ..options import ProjectConfiguration
    from ..settings import Settings
    from ..trackers.logbook import Logbook
    from .prepare import Preparation
    from .state import Run


def __getattr__(name: str) -> Any:
    """What scripts for Accelerate import from its module of this name."""
    if name in ("GeneralTracker", "on_main_process"):
        return getattr(trackers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Tracking:
    """init_trackers, log, get_tracker and trackers."""

    _run: Run
    _prepared: Preparation
    _project: ProjectConfiguration
    _logbook: Logbook
    _closed: bool

    def _begin_tracking(self, asked: Settings, own: Mapping[str, Any]) -> None:
        words = asked.log_with or "jsonl"
        self._tracker_names = trackers.choose(words, asked.source("log_with")[1], own)
        names = self._tracker_names if self._run.world.rank == 0 else []
        self._logbook = trackers.Logbook(
            names, own, Path(self._project.logging_dir or os.curdir), self._facts
        )
        self._tracked = 0  # calls of log

    def _facts(self) -> dict[str, Any]:
        plan = self._run.plan
        return {"version": __version__, "plan": plan.as_dict(), "machine": dataclasses.asdict(plan.hardware)}

    def init_trackers(
        self,
        project_name: str,
        config: Any = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Name the run, and say what it is. Without this call it is "log".

        Args:
            project_name: the run's name: files are called by it, and projects and experiments of services.
            config: hyperparameters: a dict, an argparse Namespace, or a dataclass; anything in it. The plan, the machine and easymp's
                version are logged with it.
            init_kwargs: by a tracker's name, what it takes more.

        Raises:
            SettingError: a wrong name.
            StepError: rows were logged before.
        """
        if (
            not isinstance(project_name, str)
            or not project_name
            or Path(project_name).is_absolute()
            or ".." in project_name
        ):
            raise SettingError(
                f"init_trackers({project_name!r}): pass a name, of which files and folders can be called"
            )
        options = self._by_name(init_kwargs, "init_kwargs")
        self._check_place()
        if self._tracked:
            raise StepError(
                "init_trackers() after log(): rows have been logged to another name. Call it first"
            )
        self._logbook.describe(project_name, {} if config is None else config, options)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log numbers and words by name, from the main process; on other ranks nothing happens, and nobody waits for anybody.

        Args:
            values: numbers, words, 0-dim tensors (as they are now, and without waiting for the device), or dicts of these; None leaves
                a value out.
            step: a whole number; None takes the number of optimizer updates, or of calls where no optimizer is prepared.
            log_kwargs: by a tracker's name, what its `log` takes more.

        Raises:
            SettingError: something else, on every rank that calls.
        """
        if self._closed:
            raise StepError("log() after end_training(): the trackers have finished. Log before it")
        if not self._tracked:
            self._check_place()
        row = trackers.checked_values(values)
        self._tracked += 1
        updates = max(
            (optimizer.updates for optimizer in self._prepared.optimizers), default=self._tracked - 1
        )
        if step is None:
            step = updates
        step = trackers.checked_step(step)
        options = self._by_name(log_kwargs, "log_kwargs")
        for name in options:
            if name in trackers.TRACKERS and not trackers.TRACKERS[name].takes_options:
                raise SettingError(f"log_kwargs: {name} takes nothing beside values and step. Leave it out")
        if self._run.world.rank == 0 and row and (self._tracker_names or self._logbook.attached):
            self._logbook.log(trackers.Row(step, time.time(), row, options, updates))

    @property
    def trackers(self) -> list[Any]:
        """The trackers, on the main process; none on others."""
        self._check_place()
        return list(self._logbook.trackers.values())

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The tracker of this name; on other ranks than the main one something that takes every call and does nothing.

        Args:
            unwrap: what the tracker itself stands on: TensorBoard's SummaryWriter, the run of wandb or MLflow, the path of a file.

        Raises:
            SettingError: there is none of this name.
            TrackerError: it could not start, or an earlier call said so.
        """
        self._check_name(name, "get_tracker")
        self._check_place()
        if self._run.world.rank != 0:
            return trackers.SILENT
        tracker = self._logbook.trackers.get(name.lower())
        if tracker is None:
            raise TrackerError(
                f"get_tracker: {name!r} could not start, as an earlier error said: mend what it names, or leave it out"
            )
        return (
            getattr(tracker, "tracker", tracker) if unwrap else tracker
        )  # one of the script's own may have nothing below it

    def _check_place(self) -> None:
        place = self._project.logging_dir or ""
        in_files = [name for name in self._tracker_names if name in trackers.TRACKERS]
        if "://" in place and in_files:
            raise SettingError(
                f"{in_files[0]} writes to a local folder, and the project is at {place}: pass "
                "ProjectConfiguration(project_dir=..., logging_dir='a/local/folder'), or log_with='none'"
            )

    def _by_name(
        self, options: Mapping[str, Mapping[str, Any]] | None, where: str
    ) -> dict[str, Mapping[str, Any]]:
        for name in options or ():
            self._check_name(name, where)
        return {name.lower(): given for name, given in (options or {}).items()}

    def _check_name(self, name: str, where: str) -> None:
        known = self._tracker_names
        if not isinstance(name, str) or name.lower() not in known:
            raise SettingError(
                f"{where}: {name!r} is no tracker of this run{nearest(str(name), known) or '.'} It has: {', '.join(known) or 'none'}"
            )
