"""The console: one line that shows a running training on the main process's stderr.

On a terminal and in a notebook tqdm updates the line in place. Elsewhere a line follows at the first update, one after
5 seconds, then one every 30 seconds. The loss is the one that the script logs, else that of the last `backward` of the
main process. Memory is the most that was allocated on the device, or the resident memory of the process on a CPU.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import torch
from torch import Tensor

from ..base.accumulation import Position, Progress
from ..base.dtensor import local
from ..base.parts import Part
from ..base.rng import isolated
from ..base.units import duration, rate, size
from ..errors import SettingError, failing
from ..logging import get_logger, tqdm_class
from .rows import Pending, Row

if TYPE_CHECKING:
    from ..settings import Settings

logger = get_logger(__name__)
INTERVAL, FIRST_INTERVAL = 30.0, 5.0  # seconds between two lines of a log file
REDRAW = 0.25  # seconds between two states of the line on a terminal
WINDOW = 10.0  # seconds over which rates are taken on a terminal


class Mark(NamedTuple):
    """A time (seconds), and the counts of the run at that time."""

    time: float
    updates: int
    samples: int | None
    tokens: float


class Console(Part):
    """Watches one run. ``init_kwargs={"console": {"every": 60}}`` sets the seconds between two lines of a log file."""

    name = "console"

    def __init__(self) -> None:
        self._pending = Pending()
        self._logged: dict[str, Any] = {}  # the last value of each name
        self._logs_loss = False
        self._loss: tuple[Tensor, Any] | None = None  # of the last backward, and its number of items
        self._tokens: Tensor | None = None  # counted since the last mark
        self._measured: dict[str, Any] = {}  # loss and learning rate at the last mark
        self._first: Mark | None = None
        self._marks: deque[Mark] = deque()  # the recent ones
        self._interval, self._due = INTERVAL, 0.0
        self._bar: Bar | None = None  # on a terminal and in a notebook

    @classmethod
    def wanted(cls, settings: Settings) -> Console | None:
        trackers = str(settings.log_with or "").lower().split(",")
        return cls() if cls.name in [tracker.strip() for tracker in trackers] else None

    def begin(self) -> None:
        self._progress = Progress(self.run.window)
        if self.run.world.rank:
            self.run.parts.remove(self)

    def configure(self, options: Mapping[str, Any]) -> None:
        seconds = options.get("every", INTERVAL)
        if options.keys() - {"every"} or type(seconds) not in (int, float) or not seconds > 0:
            remedy = "it takes `every`, seconds above 0 between two lines of a log file"
            raise SettingError(f"init_kwargs={{'console': {dict(options)!r}}}: {remedy}")
        self._interval = seconds

    def rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._logged.update(row.values)
        if not self._logs_loss and any("loss" in name.lower() for name in self._logged):
            self._logs_loss = True
            self.run.parts.end(self, "loss")

    def loss(self, loss: Tensor, num_items: Any = None) -> None:
        self._loss = loss.detach(), num_items  # a graph would stay in memory

    def stepped(self, optimizer: Any) -> None:
        if not self._progress.count(optimizer.updates):
            return
        window = self.run.window
        if window.items is not None:
            self._tokens = window.items + (0 if self._tokens is None else self._tokens)
            window.items = None
        time_now = time.monotonic()
        if time_now < self._due:
            return
        try:
            if self._measure(time_now):
                self._show(self._marks[0])
                interval = self._interval if len(self._marks) > 1 else min(FIRST_INTERVAL, self._interval)
                self._due = time_now + (REDRAW if self._bar else interval)
        except Exception as error:  # of a stream that is closed: the training is worth more
            self._due = math.inf
            logger.error("tracker console: %s: %s; the training goes on", type(error).__name__, error)

    def _measure(self, time_now: float, wait: bool = False) -> bool:
        """Ask the device for the numbers of this moment, or those asked for before; whether they have arrived."""
        if not self._pending:
            numbers = {"samples": self._progress.samples, **dict(self._numbers())}
            self._pending.add(Row(self._progress.updates, time_now, numbers))
            self._pending.send()
        for row in self._pending.arrived(wait):
            # Ranks that see the same data count the same tokens.
            strategy = self.run.prepared.strategy
            tokens = row.values.pop("tokens", 0.0) * strategy.data_size * strategy.context_size / self.run.world.size
            tokens += self._marks[-1].tokens if self._marks else 0.0
            mark = Mark(row.time, row.step, row.values.pop("samples"), tokens)
            self._measured, self._first = row.values, self._first or mark
            self._marks.append(mark)
            while len(self._marks) > 2 and mark.time - self._marks[1].time >= WINDOW:
                self._marks.popleft()
        return not self._pending

    def _numbers(self) -> Iterator[tuple[str, Any]]:
        if not self._logs_loss and self._loss is not None:
            loss, items = local(self._loss[0]).sum(), self._loss[1]
            yield "loss", loss if items is None else loss / items
        if self.run.prepared.optimizers:
            yield "lr", self.run.prepared.optimizers[0].param_groups[0]["lr"]
        if self._tokens is not None:
            yield "tokens", self._tokens
            self._tokens = None

    def close(self) -> None:
        """Show the end of the run, with rates of all of it; after an error, leave the line as it was."""
        if self._progress.updates:
            self._progress.finish(max(optimizer.updates for optimizer in self.run.prepared.optimizers))
        try:
            if not failing() and self._due < math.inf:
                while self._progress.updates > (self._marks[-1].updates if self._marks else 0):
                    self._measure(time.monotonic(), wait=True)
                if self._first is not None:
                    self._show(self._first, is_final=True)
        finally:
            self._loss = None
            if self._bar is not None:
                self._bar.close()

    # -- the line -----------------------------------------------------------------------------------------------------

    def _show(self, since: Mark, is_final: bool = False) -> None:
        """Show the last mark, with rates since the mark `since`."""
        mark, first = self._marks[-1], self._first or since
        position = self._progress.position(mark.updates)
        texts = []
        if self.run.window.epochs is not None:
            epoch, count = self.run.window.epochs
            texts.append(f"epoch {epoch + 1}/{count}")
        elif self._progress.epoch is not None:
            texts.append(f"epoch {self._progress.epoch + 1}")
        of_all = f"/{position.total:,}" if position.total and position.of_run else ""
        texts += [f"step {mark.updates:,}{of_all}", *self._values(), *self._rates(since, mark)]
        seconds, updates = mark.time - first.time, mark.updates - first.updates
        if is_final:
            texts.append(f"{duration(seconds)} in all")
        elif position.total is not None and updates:
            remaining = duration(seconds * (position.total - position.updates) / updates)
            texts.append(f"{remaining} left{'' if position.of_run else ' of this epoch'}")
        notebook = type(sys.stderr).__module__.startswith("ipykernel")
        if self._bar is None and (notebook or is_terminal(sys.stderr)):
            self._bar = Bar(sys.stderr)
        if self._bar is not None:
            self._bar.show("  ".join(texts), position)
        else:
            sys.stderr.write(f"{time.strftime('%H:%M:%S')}  {'  '.join(texts)}\n")
            sys.stderr.flush()

    def _values(self) -> Iterator[str]:
        """The logged values, and the loss and the learning rate where the script logs none."""
        values = {name: value for name, value in self._measured.items() if name == "loss" and not self._logs_loss}
        values |= self._logged
        if "lr" in self._measured and "learning_rate" not in values:
            values.setdefault("lr", self._measured["lr"])
        for name, value in values.items():
            yield f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"

    def _rates(self, since: Mark, mark: Mark) -> Iterator[str]:
        seconds = mark.time - since.time
        if mark.updates > since.updates and seconds > 0:
            yield f"{rate((mark.updates - since.updates) / seconds)} updates/s"
            if mark.tokens > since.tokens:
                yield f"{rate((mark.tokens - since.tokens) / seconds)} tokens/s"
            elif mark.samples and since.samples is not None:
                yield f"{rate((mark.samples - since.samples) / seconds)} samples/s"
        device = self.run.world.device
        module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        on_device = hasattr(module, "max_memory_allocated")
        memory = module.max_memory_allocated(device) if on_device else psutil.Process().memory_info().rss
        yield f"memory {size(memory)}"


def is_terminal(stream: Any) -> bool:
    return bool(getattr(stream, "isatty", bool)())  # a script's own stream may have `write` only


class Bar:
    """tqdm's line on a terminal or in a notebook. Until `close`, the line is cleared before others write there."""

    def __init__(self, stream: Any) -> None:
        with isolated():  # packages may draw random numbers at import
            tqdm = tqdm_class()
        # Without tqdm's thread, which redraws bars that stand still; on the last line, even beside an earlier run's.
        kind = type("Line", (tqdm,), {"monitor_interval": 0})
        self._bar = kind(file=stream, dynamic_ncols=True, bar_format="{desc}", leave=True, position=0)
        self._stream, self._visible, self._ends_line, self._undo = stream, True, True, ExitStack()
        outputs: set[Any] = {sys.stdout, sys.stderr}
        for output in outputs:
            if is_terminal(output):
                self._undo.callback(setattr, output, "write", output.write)
                output.write = partial(self._write_above, output.write)

    def _write_above(self, write: Callable[[str], int], text: str) -> int:
        if not text.startswith(("\r", "\x1b")):  # which begin what bars write
            if self._ends_line:
                self._bar.clear()
            self._visible, self._ends_line = False, text.endswith("\n")
        return write(text)

    def show(self, text: str, position: Position) -> None:
        if not self._ends_line:  # the script has written dots, or a prompt
            self._stream.write("\n")
        bar = self._bar
        bar.n, bar.total = position.updates, position.total
        bar.bar_format = "{percentage:3.0f}%|{bar:10}| {desc}" if position.total else "{desc}"
        bar.set_description_str(text)
        self._visible = True

    def close(self) -> None:
        self._undo.close()
        self._bar.leave = self._visible
        self._bar.close()
