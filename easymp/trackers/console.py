"""The console: one line that shows a running training on the main process's stderr.

On a terminal and in a notebook tqdm draws the line and updates it in place. Elsewhere (a log file, a pipe) whole lines follow one another:
one at the first update, one after 5 seconds, then one every 30 seconds. The line has the epoch, the step (optimizer updates), the values
that the script logged last, the learning rate, updates and samples a second, MFU, memory, and the time left. A part that is not known is
left out:

- The loss is the one that the script logs. If it logs none, it is the last micro-batch's of the main process, as `backward` got it.
- The number of epochs and the time left to the end come from ``accelerator.epochs(n)`` and the length of the loader. In another loop
  over a prepared loader the time left is that of the epoch.
- Tokens a second are counted where ``backward(loss, num_items=...)`` says how many a micro-batch has.
- MFU (model FLOPs utilization) is FLOPs a second over the device's peak in the dtype of the products (`easymp.hardware.gpus`).
  torch's FlopCounterMode counts the FLOPs of the second update. Recomputed activations count, too. There is no MFU with torch.compile:
  the counter would make torch run the model without it.
- Memory is the most that was allocated on the device, or the resident memory of the process on a CPU.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from ..base.dtensor import local
from ..base.rng import isolated
from ..base.units import rate, size
from ..errors import SettingError, failing
from ..hardware.gpus import peak_flops
from ..logging import get_logger
from ..precision import PRECISIONS
from .recorder import Ahead, Progress
from .rows import Pending, Row

logger = get_logger(__name__)
EVERY = 30.0  # seconds between two lines of a log file; less before the second one
SOON = 5.0
REDRAWN = 0.25  # seconds between two states of the line on a terminal
RECENT = 10.0  # seconds over which rates are taken on a terminal
UNFINISHED = (
    2.0  # seconds that the script's own unfinished line (a prompt, dots) keeps the terminal's last line
)
MANY = 1000  # counts of tokens that are kept before they are added up
GAP = "  "
HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Mark(NamedTuple):
    """Counts at a moment."""

    time: float
    updates: int
    samples: int | None
    tokens: float = 0.0


Part = tuple[int, str]  # a text of the line; on narrow terminals those with the largest number go first


class Console:
    """Watches one run. ``init_kwargs={"console": {"every": 60}}`` sets the seconds between two lines of a log file."""

    name = "console"

    def __init__(self, run: Any, prepared: Any) -> None:
        self._run, self._prepared, self._every = run, prepared, EVERY
        self._window = run.window
        self._progress, self._pending = Progress(run.window), Pending()
        self._logged: dict[str, Any] = {}  # the last value of each name
        self._listens = True
        self._heard: tuple[Tensor, Any] | None = None  # the last loss, and its number of items
        self._seen: dict[str, Any] = {}  # loss and learning rate at the last mark
        self._counts: list[Tensor] = []  # tokens of each update since then
        self._sent: Mark | None = None  # a mark whose numbers are on their way
        self._first: Mark | None = None
        self._marks: deque[Mark] = deque()  # the recent ones
        self._due = 0.0
        self._line: Bar | Lines | None = None
        self._flops, self._counting = Flops(run, prepared), True
        self._window.stepped.append(self._stepped)

    @property
    def tracker(self) -> Any:
        """tqdm's bar; None where lines are written, and before the first update."""
        return getattr(self._line, "bar", None)

    def configure(self, options: Mapping[str, Any]) -> None:
        every = options.get("every", EVERY)
        number = isinstance(every, (int, float)) and not isinstance(every, bool)
        if options.keys() - {"every"} or not number or not every > 0:
            words = f"init_kwargs={{'console': {dict(options)!r}}}: it takes `every`, seconds above 0 between two lines"
            raise SettingError(f"{words} of a log file")
        self._every = float(every)

    # -- from the run -------------------------------------------------------------------------------------------------

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._logged.update(row.values)
        self._listens = not any("loss" in name.lower() for name in self._logged)
        self._heard = self._heard if self._listens else None

    def hear(self, loss: Tensor, items: Any) -> None:
        """Keep the loss of a micro-batch, if the script logs none.

        It keeps its graph until the next backward, as the script's own variable does; `detach` would cost several microseconds.
        """
        if self._listens:
            self._heard = loss, items

    def _stepped(self, optimizer: Any) -> None:
        if not self._progress.count(optimizer):
            return
        window = self._window
        if window.items is not None:
            self._counts.append(window.items)
            window.items = None
            if len(self._counts) == MANY:
                self._counts = [torch.stack(self._counts).sum()]
        now = time.monotonic()
        if now < self._due and not self._counting:
            return
        try:
            if self._counting:
                self._counting = self._flops.step()
            if now >= self._due and self._look(now):
                every = self._show(self._marks[0], self._marks[-1])
                self._due = now + (self._every if every is None else every)
        except Exception as error:  # of a stream that is closed: the training is worth more
            self._due = math.inf
            logger.error("tracker console: %s: %s; the training goes on", type(error).__name__, error)

    def _look(self, now: float, wait: bool = False) -> bool:
        """Ask the device for the numbers of this moment, or those asked for before; returns whether they have arrived."""
        if self._sent is None:
            self._sent = Mark(now, self._progress.updates, self._progress.samples)
            self._pending.add(Row(self._sent.updates, now, dict(self._numbers())))
            self._pending.send()
        arrived = self._pending.arrived(wait)
        if arrived:
            self._take(self._sent, arrived[0].values)
        return bool(arrived)

    def _numbers(self) -> Iterator[tuple[str, Any]]:
        if self._listens and self._heard is not None:
            loss, items = local(self._heard[0].detach()).sum(), self._heard[1]
            yield "loss", loss if items is None else loss / items
        if self._prepared.optimizers:
            yield "lr", self._prepared.optimizers[0].param_groups[0]["lr"]
        if self._counts:
            counts, self._counts = self._counts, []
            yield "tokens", torch.stack(counts).sum()

    def _take(self, mark: Mark, values: dict[str, Any]) -> None:
        neighbours = self._run.world.size // self._prepared.strategy.data_size  # they count the same tokens
        before = self._marks[-1].tokens if self._marks else 0.0
        mark = mark._replace(tokens=before + values.pop("tokens", 0.0) / neighbours)
        self._sent, self._seen, self._first = None, values, self._first or mark
        self._marks.append(mark)
        while len(self._marks) > 2 and mark.time - self._marks[1].time >= RECENT:
            self._marks.popleft()

    def finish(self) -> None:
        """Show the end of the run, with rates of all of it; after an error, leave the line as it was."""
        if self._stepped not in self._window.stepped:
            return
        self._window.stepped.remove(self._stepped)
        self._flops.close()
        if self._line is None:
            return
        try:
            if not failing() and self._due < math.inf:
                if self._progress.updates > self._marks[-1].updates:
                    self._look(time.monotonic(), wait=True)
                assert self._first is not None
                self._show(self._first, self._marks[-1], ended=True)
        finally:
            self._line.close()
            self._heard = None

    # -- the line -----------------------------------------------------------------------------------------------------

    def _show(self, since: Mark, mark: Mark, ended: bool = False) -> float | None:
        """Show `mark`, with rates since another one; returns seconds until the next line, None for the usual ones."""
        if self._line is None:
            self._line = Bar.of(sys.stderr) or Lines(sys.stderr)
        ahead = self._progress.ahead(mark.updates)
        parts = [*self._position(mark.updates, ahead), *self._values(), *self._rates(since, mark)]
        assert self._first is not None
        seconds, made = mark.time - self._first.time, mark.updates - self._first.updates
        if ended:
            parts.append((1, f"{clock(seconds)} in all"))
        elif ahead.total is not None and made:
            left = clock(seconds * (ahead.total - ahead.done) / made)
            parts.append((1, f"{left} left" + ("" if ahead.whole else " of this epoch")))
        return self._line.show(parts, ahead)

    def _position(self, updates: int, ahead: Ahead) -> Iterator[Part]:
        epochs, loader = self._window.epochs, self._window.reading
        if epochs is not None:
            yield 1, f"epoch {epochs[0] + 1}/{epochs[1]}"
        elif loader is not None:
            yield 1, f"epoch {loader.epoch + 1}"
        yield 0, f"step {updates:,}" + (f"/{ahead.total:,}" if ahead.total and ahead.whole else "")

    def _values(self) -> Iterator[Part]:
        """The logged values, and the loss and the learning rate where the script logs none."""
        values = dict(self._logged)
        if self._listens and "loss" in self._seen:
            values = {"loss": self._seen["loss"], **values}
        if not {"lr", "learning_rate"} & values.keys() and "lr" in self._seen:
            values["lr"] = self._seen["lr"]
        for place, (name, value) in enumerate(values.items()):
            yield 2 + place, f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"

    def _rates(self, since: Mark, mark: Mark) -> Iterator[Part]:
        seconds = mark.time - since.time
        if mark.updates > since.updates and seconds > 0:
            updates = (mark.updates - since.updates) / seconds
            yield 4, f"{rate(updates)} updates/s"
            if mark.tokens > since.tokens:
                yield 3, f"{rate((mark.tokens - since.tokens) / seconds)} tokens/s"
            elif mark.samples and since.samples is not None:
                yield 3, f"{rate((mark.samples - since.samples) / seconds)} samples/s"
            if utilization := self._flops.utilization(updates):
                yield 5, f"MFU {utilization:.1%}"
        device = self._run.world.device
        module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        on_device = hasattr(module, "max_memory_allocated")
        memory = module.max_memory_allocated(device) if on_device else psutil.Process().memory_info().rss
        yield 6, f"memory {size(memory)}"


def clock(seconds: float) -> str:
    """``"04:05"``, ``"3:20:00"``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


# -- FLOPs -------------------------------------------------------------------------------------------------------------


class Flops:
    """Counts the FLOPs of one update of this rank, where the peak of its device is known."""

    def __init__(self, run: Any, prepared: Any) -> None:
        self._run, self._prepared = run, prepared
        self._counter: Any = None
        self._count = 0.0
        self._peak: float | None = None

    def step(self) -> bool:
        """An update has ended: begin to count, or end it; returns whether the next update's end matters, too."""
        if self._counter is not None:
            self.close()
            return False
        # In a mode that the script has entered, it would leave ours in place of its own.
        return bool(torch._C._len_torch_dispatch_stack()) or self._begin()

    def _begin(self) -> bool:
        plan, device = self._run.plan, self._run.world.device
        policy = PRECISIONS.get(plan.precision.value)
        name = plan.hardware.cpu.name
        if device.type != "cpu":
            name = plan.hardware.devices[device.index or 0].name
        if policy is not None and not _compiles(plan.settings):
            products = "tf32" if policy.tf32 else "fp32"
            products = "fp8" if policy.swaps else HALVES.get(policy.compute, products)
            self._peak = peak_flops(name, products)
        if self._peak is not None:
            self._counter = _counter()
            self._counter.__enter__()
        return self._peak is not None

    def close(self) -> None:
        if self._counter is not None:
            counter, self._counter = self._counter, None
            counter.__exit__(None, None, None)
            # The layers of tensor parallelism multiply DTensors, and are counted as if whole.
            world, strategy = self._run.world, self._prepared.strategy
            shares = world.size // strategy.data_size if strategy.splits_layers else 1
            self._count = 0.0 if counter.failed else counter.get_total_flops() / shares

    def utilization(self, updates: float) -> float:
        """The share of the peak at this number of updates a second; 0 where it is not known."""
        return self._count * updates / self._peak if self._peak else 0.0


def _compiles(settings: Any) -> bool:
    """Whether this process compiles: under a counter torch runs the model without it, and never compiles what it first calls there."""
    dynamo = sys.modules.get("torch._dynamo")
    return settings.compile not in (None, "no") or bool(dynamo and dynamo.utils.counters["frames"])


def _counter() -> Any:
    from torch.utils.flop_counter import FlopCounterMode

    class Counter(FlopCounterMode):
        failed = False

        def _count_flops(self, *args: Any) -> Any:
            try:
                return super()._count_flops(*args)
            except Exception:  # of a formula, for shapes that it does not know
                self.failed = True
                return args[1]

    return Counter(display=False)


# -- where the line stands ---------------------------------------------------------------------------------------------


class Lines:
    """Whole lines, each with the time of the day, where a line cannot be updated in place."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._count = stream, 0

    def show(self, parts: Sequence[Part], ahead: Ahead) -> float | None:
        self._count += 1
        if self._stream is not None:
            line = GAP.join([time.strftime("%H:%M:%S"), *(text for _, text in parts)])
            self._stream.write(line + "\n")
            self._stream.flush()
        return SOON if self._count == 1 else None

    def close(self) -> None:
        """All is written."""


class Bar:
    """One line that tqdm updates in place, on a terminal or in a notebook.

    On a terminal, `sys.stdout`, `sys.stderr` and log handlers on them are replaced until `close`, so that what the script prints gets
    lines of its own.
    """

    def __init__(self, stream: Any, terminal: bool) -> None:
        from tqdm.auto import tqdm

        kind = type(
            "Line", (tqdm,), {"monitor_interval": 0}
        )  # without tqdm's thread, which redraws bars that stand still
        self.bar = kind(file=stream, dynamic_ncols=True, bar_format="{desc}", leave=True)
        self._stream, self._shown = stream, True
        self._unfinished = 0.0  # when the script has written a part of a line
        self._undo = ExitStack()
        if terminal:
            self._redirect()

    @classmethod
    def of(cls, stream: Any) -> Bar | None:
        """The bar on `stream`, or None where that is neither a terminal nor a notebook's."""
        terminal = stream is not None and stream.isatty()
        if not terminal and type(stream).__module__.partition(".")[0] != "ipykernel":
            return None
        with isolated():  # packages may draw random numbers at import
            return cls(stream, terminal)

    def _redirect(self) -> None:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None or not stream.isatty():
                continue
            beside = Beside(stream, self._step_aside)
            setattr(sys, name, beside)
            self._undo.callback(_put_back, name, beside, stream)
            for logs in (logging.root, *logging.root.manager.loggerDict.values()):
                for handler in getattr(logs, "handlers", ()):
                    if getattr(handler, "stream", None) is stream:
                        handler.setStream(beside)
                        self._undo.callback(handler.setStream, stream)

    def _step_aside(self, text: str) -> None:
        """The script writes `text`: clear the line, or after an error leave it above."""
        if text.startswith(("\r", "\x1b")):  # a bar of its own, which tqdm keeps apart
            return
        if self._shown:
            self._shown = False
            if failing():
                self._stream.write("\n")
            else:
                self.bar.clear()
        self._unfinished = 0.0 if text.endswith("\n") else time.monotonic()

    def show(self, parts: Sequence[Part], ahead: Ahead) -> float:
        if self._unfinished:
            if time.monotonic() - self._unfinished < UNFINISHED:
                return REDRAWN
            self._stream.write("\n")
            self._unfinished = 0.0
        bar = self.bar
        bar.n, bar.total = ahead.done, ahead.total
        bar.bar_format = "{percentage:3.0f}%|{bar:10}| {desc}" if ahead.total else "{desc}"
        columns = bar.format_dict["ncols"]
        bar.set_description_str(fitted(parts, columns - 18) if columns else fitted(parts), refresh=False)
        bar.refresh()
        self._shown = True
        return REDRAWN

    def close(self) -> None:
        self._undo.close()
        self.bar.leave = self._shown
        self.bar.close()


class Beside:
    """A terminal's stream that says what is written before it is."""

    def __init__(self, stream: Any, tell: Callable[[str], None]) -> None:
        self._stream, self._tell = stream, tell

    def write(self, text: str) -> int:
        self._tell(text)
        return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _put_back(name: str, beside: Beside, stream: Any) -> None:
    if getattr(sys, name) is beside:
        setattr(sys, name, stream)


def fitted(parts: Sequence[Part], columns: float = math.inf) -> str:
    """The texts that fit `columns`, in their order."""
    kept = list(parts)
    while len(kept) > 1 and sum(len(text) + len(GAP) for _, text in kept) > columns:
        kept.remove(max(kept))
    return GAP.join(text for _, text in kept)
