"""The tracker that writes down a run where ``EASYMP_RECORD`` names a folder; `easymp compare` reads it.

The folder gets a file a rank, ``rank-0.jsonl`` …, of JSON objects in lines. Each has `event` and `at`, seconds since
the Accelerator was made:

- ``begin``: `time` (seconds since 1970), `rank`, `ranks`, `plan`, `machine`, and `memory`: "device" for bytes allocated
  on it, "process" for bytes resident in this process and its children
- ``memory``: `bytes` now, and `updates` and `samples` so far; several a second
- ``first``: the end of the first optimizer update, with `updates`, `samples`, and `total`: updates of the whole
  training, or None
- ``log``: numbers that the script logged, as `values`, with its `step`, and `updates` made by then; of rank 0 only
- ``end``: `plan`, `updates`, `samples`, `peak` bytes, `last` (when the last update ended), and `seconds` from the end
  of the first update to that of the last, on an accelerator by its own clock

Samples are those of all ranks, None where they are unknown; numbers that are not finite are the words "nan", "inf" and
"-inf". A killed run has no ``end``, and a script that makes several Accelerators several ``begin``.
"""

from __future__ import annotations

import json
import math
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..base import env
from ..base.accumulation import Progress
from ..base.parts import Part
from ..hardware import Hardware
from ..logging import get_logger
from ..settings import RECORD, Settings
from ..version import __version__
from .rows import Row

logger = get_logger(__name__)
INTERVAL = 0.05  # seconds between two samples of memory, at first
MANY = 2000  # samples after which the interval doubles, so that a run of days does not fill the disk
SEARCH = 1.0  # seconds of processor time between two searches for child processes, which are slow


class Recorder(Part):
    """Writes this rank's record to `folder`. It waits for the device at the end only."""

    name = "record"

    def __init__(self, folder: str) -> None:
        self._folder = folder

    @classmethod
    def wanted(cls, settings: Settings) -> Recorder | None:
        folder = env.read(RECORD)
        return cls(folder) if folder else None

    def begin(self) -> None:
        run = self.run
        device = run.world.device
        Path(self._folder).mkdir(parents=True, exist_ok=True)
        # Unbuffered: a killed rank's lines are on disk, and a forked child has no copy of them to write again.
        self._file = open(Path(self._folder) / f"rank-{run.world.rank}.jsonl", "ab", buffering=0)  # noqa: SIM115
        self._start, self._time = time.perf_counter(), time.time()
        self._progress = Progress(run.window)
        self._first_end = self._last_end = 0.0  # of updates
        self._marks: list[Any] = []
        if device.type != "cpu":
            self._marks = [torch.Event(device, enable_timing=True) for _ in range(2)]
        self._memory = Sampler(device, lambda size: self._write("memory", bytes=size, **self._counts()))
        self._write(
            "begin",
            time=self._time,
            rank=run.world.rank,
            ranks=run.world.size,
            memory="device" if self._memory.module else "process",
            plan=run.plan.as_dict(),
            machine=facts(run.plan.hardware),
        )
        self._memory.start()

    def rows(self, rows: Sequence[Row]) -> None:
        for row in rows if not self._file.closed else ():
            numbers = {
                name: value if math.isfinite(value) else str(float(value))
                for name, value in row.values.items()
                if isinstance(value, (int, float))
            }
            if numbers:
                seconds = round(row.time - self._time, 4)
                self._write("log", seconds, step=row.step, updates=row.updates, values=numbers)

    def close(self) -> None:
        if self._file.closed:
            return
        self._memory.stop()
        seconds = self._last_end - self._first_end
        if self._marks and self._progress.updates > 1:
            try:
                self._marks[1].synchronize()
                seconds = self._marks[0].elapsed_time(self._marks[1]) / 1000
            except RuntimeError as error:  # the device has failed, which ends the run
                message = "the device's clock cannot be read, so the record's seconds are the host's: %s"
                logger.warning(message, error, main_process_only=False)
        peak, plan = self._memory.peak, self.run.plan.as_dict()
        self._write("end", plan=plan, seconds=seconds, last=self._last_end, peak=peak, **self._counts())
        self._file.close()

    def stepped(self, optimizer: Any) -> None:
        if not self._progress.count(optimizer.updates):
            return
        self._last_end, is_first = time.perf_counter() - self._start, self._progress.updates == 1
        if self._marks:
            self._marks[not is_first].record()
        if is_first:
            self._first_end = self._last_end
            position = self._progress.position(1)
            self._write("first", total=position.total if position.of_run else None, **self._counts())

    def _counts(self) -> dict[str, int | None]:
        return {"updates": self._progress.updates, "samples": self._progress.samples}

    def _write(self, event: str, seconds: float | None = None, **fields: Any) -> None:
        seconds = round(time.perf_counter() - self._start, 4) if seconds is None else seconds
        line = json.dumps({"event": event, "at": seconds, **fields}, allow_nan=False)
        os.write(self._file.fileno(), line.encode() + b"\n")  # one call: lines of two threads do not mix


class Sampler(threading.Thread):
    """Passes the bytes in use to `report` several times a second, until `stop`.

    Attributes:
        module: torch's module of the device, for its allocated bytes; None for the resident bytes of this process and
            its children (loaders' workers), shared pages counted in each.
        peak: the most so far: the device's own count, or the largest sample.
    """

    def __init__(self, device: torch.device, report: Callable[[int], None]) -> None:
        super().__init__(name="easymp-memory", daemon=True)
        self._report, self._device, self._stopped = report, device, threading.Event()
        module = None if device.type == "cpu" else torch.get_device_module(device)
        self.module: Any = module if hasattr(module, "memory_allocated") else None
        import psutil  # slow to import, and most runs are not recorded

        self._process, self._search_time, self._ended = psutil.Process(), 0.0, psutil.Error
        self._children: list[Any] = []
        self.peak = 0

    def run(self) -> None:
        interval, samples = INTERVAL, 0
        self.sample()
        while not self._stopped.wait(interval):
            self.sample()
            samples += 1
            if samples == MANY:
                interval, samples = interval * 2, 0

    def sample(self) -> None:
        size = int(self.module.memory_allocated(self._device)) if self.module else self._resident()
        self.peak = max(self.peak, size)
        self._report(size)

    def stop(self) -> None:
        self._stopped.set()
        self.join()
        self.sample()
        if self.module:
            self.peak = int(self.module.max_memory_allocated(self._device))

    def _resident(self) -> int:
        cpu_seconds = float(sum(self._process.cpu_times()[:2]))
        if cpu_seconds - self._search_time >= SEARCH:  # a process that waits has no new children
            self._search_time, self._children = cpu_seconds, self._process.children(recursive=True)
        total = int(self._process.memory_info().rss)
        for child in self._children:
            with suppress(self._ended):
                total += child.memory_info().rss
        return total


def facts(hardware: Hardware) -> dict[str, Any]:
    """The machine for a report, as plain values; no names of hosts or users."""
    cpu = hardware.cpu
    return {
        "processor": cpu.name,
        "cores": cpu.cores,
        "threads": cpu.threads,
        "memory": cpu.memory,
        "devices": [{"name": d.name, "memory": d.memory, "architecture": d.architecture} for d in hardware.devices],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "easymp": __version__,
    }
