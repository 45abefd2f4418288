"""Logging of a run: `Accelerator.log` on any rank, written by trackers on the main process. No call here is a collective."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import trackers
from ..errors import SettingError, StepError, TrackerError, nearest
from ..version import __version__

if TYPE_CHECKING:
    from ..options import ProjectConfiguration
    from ..settings import Settings
    from .prepare import Preparation
    from .state import Run

Options = Mapping[str, Mapping[str, Any]] | None  # a tracker's name → further arguments


class Tracking:
    """`init_trackers`, `log`, `trackers` and `get_tracker` of an Accelerator.

    Args:
        own: the script's trackers by lower-case name.
        prepared: its optimizers' updates count the steps.

    Attributes:
        logbook: starts the trackers and hands rows to them; on other ranks than the main one it has none.
    """

    def __init__(
        self,
        run: Run,
        project: ProjectConfiguration,
        asked: Settings,
        own: Mapping[str, Any],
        prepared: Preparation,
    ) -> None:
        self._run, self._project, self._optimizers = run, project, prepared.optimizers
        self.names = trackers.choose(asked.log_with or "jsonl", asked.source("log_with")[1], own)
        self._main = run.world.rank == 0
        folder = Path(project.logging_dir or os.curdir)
        keep = [name for name in self.names if name in own or not trackers.TRACKERS[name].watches]
        self._in_files = [name for name in keep if name in trackers.TRACKERS]
        self.logbook = trackers.Logbook(keep if self._main else [], own, folder, self._facts)
        if self._main and len(keep) < len(self.names):
            self.logbook.attached["console"] = trackers.Console(run, prepared, self.logbook.listen)
        self._begun, self._calls = False, 0

    def _facts(self) -> dict[str, Any]:
        plan = self._run.plan
        return {"version": __version__, "plan": plan.as_dict(), "machine": dataclasses.asdict(plan.hardware)}

    def describe(self, project_name: str, config: Any, init_kwargs: Options) -> None:
        good = isinstance(project_name, str) and project_name and ".." not in project_name
        if not good or Path(project_name).is_absolute():
            raise SettingError(f"init_trackers({project_name!r}): pass a name, which names files and folders")
        options = self.by_name(init_kwargs, "init_kwargs")
        self._check_place()
        if self._begun:
            raise StepError(
                "init_trackers() after log(): rows have been logged to another name. Call it first"
            )
        if "console" in self.logbook.attached:
            self.logbook.attached["console"].configure(options.get("console", {}))
        self.logbook.describe(project_name, {} if config is None else config, options)

    def log(self, values: Mapping[str, Any], step: int | None, log_kwargs: Options) -> None:
        row, updates = trackers.checked_values(values), self._updates
        step = self._begin(step)
        self._calls += 1
        options = self.by_name(log_kwargs, "log_kwargs")
        for name in options:
            if name in trackers.TRACKERS and not trackers.TRACKERS[name].takes_options:
                raise SettingError(f"log_kwargs: {name} takes nothing beside values and step. Leave it out")
        if self._main and row and (self.names or self.logbook.attached):
            self.logbook.log(trackers.Row(step, time.time(), row, options, updates))

    @property
    def _updates(self) -> int:
        """Updates of the optimizers, or calls of `log` where there is none."""
        return max((optimizer.updates for optimizer in self._optimizers), default=self._calls)

    def log_images(self, name: str, images: Any, step: int | None) -> None:
        step = self._begin(step, f"log_images({name!r})", name)
        array, changed = trackers.checked_images(images, convert=self._main)
        if self._main:
            if changed:
                self.logbook.say(
                    f"log_images({name!r}): {changed}. Undo a normalisation before, or pass uint8"
                )
            self.logbook.show(self.names, "log_images", {name: array}, step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Iterable[Any], step: int | None) -> None:
        step = self._begin(step, f"log_table({name!r})", name)
        names, data = trackers.checked_table(columns, rows)
        if self._main:
            self.logbook.show(self.names, "log_table", name, columns=names, data=data, step=step)

    def _begin(self, step: int | None, call: str = "log()", name: str = "values") -> int:
        if not isinstance(name, str) or not name:
            raise SettingError(f"{call}: pass a name, such as 'predictions'")
        if not self._begun:
            self._check_place()
        step = trackers.checked_step(self._updates if step is None else step)
        self._begun = True
        return step

    def all(self) -> list[Any]:
        self._check_place()
        watching = [one for name, one in self.logbook.attached.items() if name in trackers.TRACKERS]
        return [*self.logbook.trackers.values(), *watching]

    def get(self, name: str, unwrap: bool) -> Any:
        self._check_name(name, "get_tracker")
        self._check_place()
        if not self._main:
            return trackers.SILENT
        tracker = {**self.logbook.attached, **self.logbook.trackers}.get(name.lower())
        if tracker is None:
            raise TrackerError(
                f"get_tracker: {name!r} could not start, as an earlier error said: correct that, or leave it out"
            )
        return (
            getattr(tracker, "tracker", tracker) if unwrap else tracker
        )  # a script's own has nothing below it

    def _check_place(self) -> None:
        place = self._project.logging_dir or ""
        if "://" in place and self._in_files:
            raise SettingError(
                f"{self._in_files[0]} writes to a local folder, and the project is at {place}: pass "
                "ProjectConfiguration(project_dir=..., logging_dir='a/local/folder'), or log_with='none'"
            )

    def by_name(self, options: Options, where: str) -> dict[str, Mapping[str, Any]]:
        for name in options or ():
            self._check_name(name, where)
        return {name.lower(): given for name, given in (options or {}).items()}

    def _check_name(self, name: str, where: str) -> None:
        if not isinstance(name, str) or name.lower() not in self.names:
            near = nearest(str(name), self.names) or "."
            raise SettingError(
                f"{where}: {name!r} is not a tracker of this run{near} It has: {', '.join(self.names) or 'none'}"
            )
