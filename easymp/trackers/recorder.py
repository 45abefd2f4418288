"""The tracker that writes down a run where ``EASYMP_RECORD`` names a folder; `easymp compare` reads it.

The folder gets a file a rank, ``rank-0.jsonl`` …, of JSON objects in lines. Each has `event` and `at`, seconds since the Accelerator
was made:

- ``begin``: `time` (seconds since 1970), `rank`, `ranks`, `plan`, `machine`, and `memory`: "device" for bytes allocated on it,
  "process" for bytes resident in this process and its children
- ``memory``: `bytes` now, and `updates` and `samples` so far; several a second
- ``first``: the end of the first optimizer update, with `updates`, `samples`, and `total`: updates of the whole training, or None
- ``log``: numbers that the script logged, as `values`, with its `step`, and `updates` made by then; of rank 0 only
- ``end``: `plan`, `updates`, `samples`, `peak` bytes, `last` (when the last update ended), and `seconds` from the end of the first
  update to that of the last, on an accelerator by its own clock

Samples are those of all ranks, None where they are unknown; numbers that are not finite are the words "nan", "inf" and "-inf". A
killed run has no ``end``, and a script that makes several Accelerators several ``begin``.
"""

from __future__ import annotations

import json
import math
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from ..hardware import Hardware
from ..logging import get_logger
from ..version import __version__
from .rows import Row

logger = get_logger(__name__)
EVERY = 0.05  # seconds between two samples of memory, at first
MANY = 2000  # samples after which the interval doubles, so that a run of days does not fill the disk
FAMILY = 1.0  # seconds of processor time between two searches for child processes, which are slow


class Recorder:
    """Writes this rank's record to `folder` until `finish`; a tracker on the main process.

    The update window calls it at each update; it waits for the device at the end only.
    """

    name = "record"

    def __init__(self, folder: str, run: Any) -> None:
        self._run, self._window, device = run, run.window, run.world.device
        Path(folder).mkdir(parents=True, exist_ok=True)
        # Unbuffered: a killed rank's lines are on disk, and a forked child has no copy of them to write again.
        self._file = open(Path(folder) / f"rank-{run.world.rank}.jsonl", "ab", buffering=0)  # noqa: SIM115
        self._begun, self._time = time.perf_counter(), time.time()
        self._progress = Progress(run.window)
        self._first = self._last = 0.0
        self._marks: list[Any] = []
        if device.type != "cpu":
            self._marks = [torch.Event(device, enable_timing=True) for _ in range(2)]
        self._memory = Sampler(device, lambda count: self._write("memory", bytes=count, **self._counted()))
        self._write(
            "begin",
            time=self._time,
            rank=run.world.rank,
            ranks=run.world.size,
            memory="device" if self._memory.module else "process",
            plan=run.plan.as_dict(),
            machine=facts(run.plan.hardware),
        )
        self._window.stepped.append(self._stepped)
        self._memory.start()

    def write(self, rows: Sequence[Row]) -> None:
        """Write the numbers of `rows`."""
        for row in rows:
            numbers = {
                name: value if math.isfinite(value) else str(float(value))
                for name, value in row.values.items()
                if isinstance(value, (int, float))
            }
            if numbers:
                at = round(row.time - self._time, 4)
                self._write("log", at, step=row.step, updates=row.updates, values=numbers)

    def finish(self) -> None:
        """Write the end. A second call does nothing."""
        if self._file.closed:
            return
        self._window.stepped.remove(self._stepped)
        self._memory.stop()
        seconds = self._last - self._first
        if self._marks and self._progress.updates > 1:
            try:
                self._marks[1].synchronize()
                seconds = self._marks[0].elapsed_time(self._marks[1]) / 1000
            except RuntimeError as error:  # the device has failed, which ends the run
                words = "the device's clock cannot be read, so the record's seconds are the host's: %s"
                logger.warning(words, error, main_process_only=False)
        peak, plan = self._memory.peak, self._run.plan.as_dict()
        self._write("end", plan=plan, seconds=seconds, last=self._last, peak=peak, **self._counted())
        self._file.close()

    def _stepped(self, optimizer: Any) -> None:
        if not self._progress.count(optimizer.updates):
            return
        self._last, first = time.perf_counter() - self._begun, self._progress.updates == 1
        if self._marks:
            self._marks[not first].record()
        if first:
            self._first = self._last
            ahead = self._progress.ahead(1)
            self._write("first", total=ahead.total if ahead.whole else None, **self._counted())

    def _counted(self) -> dict[str, int | None]:
        return {"updates": self._progress.updates, "samples": self._progress.samples}

    def _write(self, event: str, at: float | None = None, **rest: Any) -> None:
        at = round(time.perf_counter() - self._begun, 4) if at is None else at
        line = json.dumps({"event": event, "at": at, **rest}, allow_nan=False)
        os.write(self._file.fileno(), line.encode() + b"\n")  # one call: lines of two threads do not mix


class Ahead(NamedTuple):
    """Updates done and to do, in the training or (`whole` is False) in the epoch; `total` is None where it is not known."""

    done: int
    total: int | None
    whole: bool


class Progress:
    """Counts updates, and samples of all ranks; `samples` is None once an update read no prepared loader.

    Attributes:
        epoch: of the loader that the last counted update read; None without one.
        end: updates at the end of that pass of the loader; infinite where it has no length.
    """

    def __init__(self, window: Any) -> None:
        self._window = window
        self.updates = 0
        self.samples: int | None = 0
        self.epoch: int | None = None
        self.end = math.inf
        self._loader: Any = None
        self._position = 0  # of the loader at the last update
        self._began = 0  # updates before the pass, as far as this process has made them
        self._total: int | None = None  # updates in the training, once known

    def count(self, updates: int) -> bool:
        """Count up to an optimizer's number of updates. False: of several optimizers, another one has reached this number before.

        A caller may leave out updates, but not the first after a change of the window's `loops`.
        """
        if updates <= self.updates:
            return False
        self.updates, loader = updates, self._window.reading
        if loader is None:
            self.samples = self.epoch = self._loader = None
            return True
        if loader is not self._loader or loader.epoch != self.epoch:
            self._add()  # the rest of the pass before
            self._loader, self.epoch, self._position, self._began = loader, loader.epoch, 0, updates - 1
            done, each = self._of_pass(updates) or (0, math.inf)
            self.end = updates - done + each
        self._add()
        return True

    def finish(self, updates: int) -> None:
        """Count the rest of the run, which has made so many updates."""
        self.updates = updates
        self._add()

    def ahead(self, updates: int) -> Ahead:
        """What lies ahead of the first `updates`, as far as ``accelerator.epochs(n)`` and the loader's length tell."""
        of_pass, epochs = self._of_pass(updates), self._window.epochs
        if of_pass is None:
            return Ahead(updates, self._total if self._total and self._total >= updates else None, True)
        done, each = of_pass
        if epochs is None:
            return Ahead(done, each, False)
        epoch, count = epochs
        self._total = updates - done + each * (count - epoch)
        return Ahead(updates, self._total if self._total >= updates else None, True)

    def _now(self) -> int:
        """The position of the pass; after its end, its last one."""
        loader = self._loader
        if loader.epoch == self.epoch and loader.position:
            return int(loader.position)
        return loader.ended[1] if loader.ended and loader.ended[0] == self.epoch else self._position

    def _add(self) -> None:
        if self._loader is not None:
            before, self._position = self._position, self._now()
            if self.samples is not None:
                self.samples += self._position - before

    def _of_pass(self, updates: int) -> tuple[int, int] | None:
        """Updates made in the pass of the loader, and in a whole one; None without a loader that has a length."""
        loader, accumulation = self._loader, self._window.accumulation
        try:
            each = -(-len(loader) // accumulation)
        except TypeError:
            return None
        if not loader.total_batch_size:
            return updates - self._began, each
        micro = -(-self._now() // loader.total_batch_size)  # also after a resume inside a pass
        return -(-micro // accumulation), each


class Sampler(threading.Thread):
    """Passes the bytes in use to `tell` several times a second, until `stop`.

    Attributes:
        module: torch's module of the device, for its allocated bytes; None for the resident bytes of this process and its children
            (loaders' workers), shared pages counted in each.
        peak: the most so far: the device's own count, or the largest sample.
    """

    def __init__(self, device: torch.device, tell: Callable[[int], None]) -> None:
        super().__init__(name="easymp-memory", daemon=True)
        self._tell, self._device, self._over = tell, device, threading.Event()
        module = None if device.type == "cpu" else torch.get_device_module(device)
        self.module: Any = module if hasattr(module, "memory_allocated") else None
        self._process, self._children, self._searched = psutil.Process(), [], 0.0
        self.peak = 0

    def run(self) -> None:
        every, samples = EVERY, 0
        self.sample()
        while not self._over.wait(every):
            self.sample()
            samples += 1
            if samples == MANY:
                every, samples = every * 2, 0

    def sample(self) -> None:
        now = int(self.module.memory_allocated(self._device)) if self.module else self._resident()
        self.peak = max(self.peak, now)
        self._tell(now)

    def stop(self) -> None:
        self._over.set()
        self.join()
        self.sample()
        if self.module:
            self.peak = int(self.module.max_memory_allocated(self._device))

    def _resident(self) -> int:
        now = float(sum(self._process.cpu_times()[:2]))
        if now - self._searched >= FAMILY:  # processor time: a process that waits has no new children
            self._searched, self._children = now, self._process.children(recursive=True)
        total = self._process.memory_info().rss
        for child in self._children:
            try:
                total += child.memory_info().rss
            except psutil.Error:  # it has ended
                continue
        return int(total)


def facts(hardware: Hardware) -> dict[str, Any]:
    """The machine for a report, as plain values; no names of hosts or users."""
    devices = [{"name": d.name, "memory": d.memory, "architecture": d.architecture} for d in hardware.devices]
    return {
        "processor": hardware.cpu.name,
        "cores": hardware.cpu.cores,
        "threads": hardware.cpu.threads,
        "memory": hardware.cpu.memory,
        "devices": devices,
        "links": hardware.links,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "easymp": __version__,
    }
