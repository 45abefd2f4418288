"""The tracker that `easymp compare` attaches to a run, beside the user's own; see the room's docstring for what it writes."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...base import env
from ...logging import get_logger
from ...settings import RECORD
from ..rows import Row
from .machine import facts
from .sampler import Sampler

logger = get_logger(__name__)


class Recorder:
    """Writes this rank's record until `finish`; a `Tracker` on the main process.

    It hears of updates by the step clock, and waits for the device at the end only.

    Args:
        folder: gets the file of this rank, which may hold earlier recordings; made if it is not there.
    """

    name = "record"

    def __init__(self, folder: str, run: Any) -> None:
        self._run, self._clock, device = run, run.clock, run.world.device
        Path(folder).mkdir(parents=True, exist_ok=True)
        # Unbuffered: what a killed rank has told is there, and a forked child has no copy of it to write again.
        self._file = open(Path(folder) / f"rank-{run.world.rank}.jsonl", "ab", buffering=0)  # noqa: SIM115 (open to the end)
        self._begun, self._time = time.perf_counter(), time.time()
        self._updates, self._samples, self._known = 0, 0, True
        self._place: tuple[int, int, int] = (0, 0, 0)  # loader, epoch and position at the last update
        self._first = self._last = self._sampled = 0.0
        self._marks: tuple[Any, Any] | None = None
        if device.type != "cpu":
            self._marks = (torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True))
        self._memory = Sampler(device, lambda count: self._write("memory", bytes=count, **self._counted()))
        self._write(
            "begin",
            time=self._time,
            rank=run.world.rank,
            ranks=run.world.size,
            memory=self._memory.kind,
            plan=run.plan.as_dict(),
            machine=facts(run.plan.hardware),
        )
        self._clock.stepped.append(self._stepped)
        self._memory.start()

    # -- a tracker ----------------------------------------------------------------------------------------------------

    def write(self, rows: Sequence[Row]) -> None:
        """The numbers of `rows`."""
        for row in rows:
            numbers = {
                name: _said(value) for name, value in row.values.items() if isinstance(value, (int, float))
            }
            if numbers:
                self._write(
                    "log", round(row.time - self._time, 4), step=row.step, updates=row.updates, values=numbers
                )

    def finish(self) -> None:
        """Write the end. Calling it again does nothing."""
        if self._file.closed:
            return
        self._clock.stepped.remove(self._stepped)
        self._memory.stop()
        seconds = self._last - self._first
        if self._marks is not None and self._updates > 1:
            try:
                self._marks[1].synchronize()
                seconds = self._marks[0].elapsed_time(self._marks[1]) / 1000
            except RuntimeError as error:  # the device has failed, which ends the run
                logger.warning(
                    "the record's seconds are by the host's clock, for the device's cannot be read: %s",
                    error,
                    main_process_only=False,
                )
        self._write(
            "end",
            plan=self._run.plan.as_dict(),
            seconds=seconds,
            last=self._last,
            peak=self._memory.peak,
            **self._counted(),
        )
        self._file.close()

    # -- what it counts -----------------------------------------------------------------------------------------------

    def _stepped(self, optimizer: Any) -> None:
        """An optimizer has made an update; of several the first to make its number `updates` counts."""
        updates = optimizer.updates
        if updates <= self._updates:
            return
        self._updates, self._last = updates, time.perf_counter() - self._begun
        self._count()
        if self._marks is not None:
            self._marks[updates > 1].record()
        if updates == 1:
            self._first = self._last
            self._write("first", **self._counted())

    def _count(self) -> None:
        loader = self._clock.reading
        if loader is None:
            self._known = False
            return
        before, self._place = self._place, (id(loader), loader.epoch, loader.position)
        self._samples += loader.position - (before[2] if before[:2] == self._place[:2] else 0)

    def _counted(self) -> dict[str, int | None]:
        return {"updates": self._updates, "samples": self._samples if self._known else None}

    def _write(self, event: str, at: float | None = None, **rest: Any) -> None:
        at = round(time.perf_counter() - self._begun, 4) if at is None else at
        line = json.dumps({"event": event, "at": at, **rest}, allow_nan=False)
        os.write(
            self._file.fileno(), line.encode() + b"\n"
        )  # one call, so that lines of two threads do not mix


def begin(run: Any) -> Recorder | None:
    """Record `run`, where the environment asks for it."""
    folder = env.read(RECORD)
    return Recorder(folder, run) if folder else None


def _said(value: float) -> float | str:
    return value if math.isfinite(value) else str(float(value))
