"""The console: one line that shows a running training on the main process's stderr.

On a terminal and in a notebook tqdm draws the line and updates it in place; a forked process of a notebook has text in place of a
widget. Elsewhere (a log file, a pipe) whole lines follow one another:
one at the first update, one after 5 seconds, then one every 30 seconds. A part that is not known is left out:

- The loss is the one that the script logs. If it logs none, it is the last micro-batch's of the main process, as `backward` got it. It is
  looked at a few times a second and at the end of an epoch; one that is older than its line stands there with its step.
- The number of epochs and the time left to the end come from ``accelerator.epochs(n)`` and the length of the loader. In another loop
  over a prepared loader the time left is that of the epoch.
- Tokens a second are counted where ``backward(loss, num_items=...)`` says how many a micro-batch has.
- MFU (model FLOPs utilization) is FLOPs a second over the device's peak in the dtype of the products (`easymp.hardware.gpus`).
  torch's FlopCounterMode counts the FLOPs of the second update. Recomputed activations count, too. There is no MFU with torch.compile:
  the counter would make torch run the model without it.
- Memory is the most that was allocated on the device, or the resident memory of the process on a CPU.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ..base.dtensor import local
from ..base.rng import isolated
from ..base.units import duration, rate, size
from ..errors import SettingError, failing
from ..hardware.gpus import peak_flops
from ..logging import get_logger, tqdm_class
from ..precision import PRECISIONS
from ..precision.policies import product_type
from .recorder import Ahead, Progress
from .rows import Pending, Row

logger = get_logger(__name__)
EVERY = 30.0  # seconds between two lines of a log file; less before the second one
SOON = 5.0
REDRAWN = 0.25  # seconds between two states of the line on a terminal, and between two looks at the loss
RECENT = 10.0  # seconds over which rates are taken on a terminal
UNFINISHED = 2.0  # seconds for which a line that the script has not ended (a prompt, dots) stays the last one
MANY = 1000  # counts of tokens that are kept before they are added up
GAP = "  "

Part = tuple[int, str]  # a text of the line; on narrow terminals those with the largest number go first


class Mark(NamedTuple):
    """Counts at a moment."""

    time: float
    updates: int
    samples: int | None
    tokens: float = 0.0


class Console:
    """Watches one run. ``init_kwargs={"console": {"every": 60}}`` sets the seconds between two lines of a log file.

    Args:
        listen: called with `_hear` for the loss of each backward from then on, and with None to end that.
    """

    name = "console"

    def __init__(self, run: Any, prepared: Any, listen: Callable[[Any], None]) -> None:
        self._run, self._prepared, self._window = run, prepared, run.window
        self._progress, self._pending = Progress(run.window), Pending()
        self._logged: dict[str, Any] = {}  # the last value of each name
        self._listen, self._listens = listen, True  # until the script logs a loss
        self._heard: tuple[Tensor, Any] | None = None  # the loss of a backward, and its number of items
        self._loss: tuple[int, Tensor] | None = (
            None  # the update of the last look, and its loss without graph
        )
        self._seen: dict[str, Any] = {}  # loss, its update, and the learning rate at the last mark
        self._counts: list[Tensor] = []  # tokens of each update since then
        self._sent: Mark | None = None  # a mark whose numbers are on their way
        self._first: Mark | None = None
        self._marks: deque[Mark] = deque()  # the recent ones
        self._every, self._due = EVERY, 0.0
        self._until = 0.0  # the update that is counted next, if no loop changes and the time is not over
        self._wake, self._loops = 0.0, 0
        self._now = self._next = 0.0  # of the last counted update, and when the loss is to be looked at again
        self._span = 0.0  # seconds of an update
        self._bar: Bar | None = None  # on a terminal and in a notebook
        self._flops, self._counting = Flops(run, prepared), True
        self._window.stepped.append(self._stepped)
        listen(self._hear)

    def configure(self, options: Mapping[str, Any]) -> None:
        every = options.get("every", EVERY)
        if options.keys() - {"every"} or type(every) not in (int, float) or not every > 0:
            words = f"init_kwargs={{'console': {dict(options)!r}}}: it takes `every`, seconds above 0 between two lines"
            raise SettingError(f"{words} of a log file")
        self._every = every

    # -- from the run -------------------------------------------------------------------------------------------------

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._logged.update(row.values)
        if self._listens and any("loss" in name.lower() for name in self._logged):
            self._listens, self._next = False, math.inf
            self._listen(None)

    def _hear(self, loss: Tensor, items: Any) -> None:
        """Keep the loss of a micro-batch. Called around the updates only that show it: a kept graph costs microseconds."""
        self._heard = loss, items

    def _stepped(self, optimizer: Any) -> None:
        updates, now, window = optimizer.updates, time.monotonic(), self._window
        quiet = updates < self._until and now < self._wake
        if quiet and window.loops == self._loops and window.items is None:
            return
        progress, counted = self._progress, self._progress.updates
        if not progress.count(updates):
            return
        if window.items is not None:
            self._counts.append(window.items)
            window.items = None
            if len(self._counts) == MANY:
                self._counts = [torch.stack(self._counts).sum()]
        if self._heard is not None:
            (loss, items), self._heard = self._heard, None
            loss = local(loss.detach()).sum()
            self._loss = updates, loss if items is None else loss / items
            self._listen(None)
            self._next = now + REDRAWN
        elif now >= self._next:
            self._next = now + REDRAWN
        # Listen to the next update if it may end when a line or a look is due, or ends the epoch.
        # The shorter of the last two times tells how long it takes: an evaluation may lie before one.
        last = (now - self._now) / (updates - counted)
        span, self._span, self._now, self._loops = min(last, self._span), last, now, window.loops
        self._wake = min(self._next, self._due) - 2 * span
        soon = now >= self._wake or updates + 1 == progress.end
        if soon and self._listens:
            self._listen(self._hear)
        self._until = (
            0 if soon or self._counting else progress.end - 1 if updates < progress.end else math.inf
        )
        if now < self._due and not self._counting:
            return
        try:
            if self._counting:
                self._counting = self._flops.step()
            if now >= self._due and self._look(now):
                self._show(self._marks[0])
                later = self._every if len(self._marks) > 1 else min(SOON, self._every)
                self._due = now + (REDRAWN if self._bar else later)
        except Exception as error:  # of a stream that is closed: the training is worth more
            self._due = math.inf
            logger.error("tracker console: %s: %s; the training goes on", type(error).__name__, error)

    def _look(self, now: float, wait: bool = False) -> bool:
        """Ask the device for the numbers of this moment, or those asked for before; returns whether they have arrived."""
        if self._sent is None:
            self._sent = Mark(now, self._progress.updates, self._progress.samples)
            self._pending.add(Row(self._sent.updates, now, dict(self._numbers())))
            self._pending.send()
        for row in self._pending.arrived(wait):
            # Ranks that see the same data count the same tokens.
            strategy = self._prepared.strategy
            shares = strategy.data_size * strategy.context_size  # that hold different tokens
            tokens = row.values.pop("tokens", 0.0) * shares / self._run.world.size
            mark = self._sent._replace(tokens=tokens + (self._marks[-1].tokens if self._marks else 0.0))
            self._sent, self._seen, self._first = None, row.values, self._first or mark
            self._marks.append(mark)
            while len(self._marks) > 2 and mark.time - self._marks[1].time >= RECENT:
                self._marks.popleft()
        return self._sent is None

    def _numbers(self) -> Iterator[tuple[str, Any]]:
        if self._listens and self._loss is not None:
            yield from zip(("update", "loss"), self._loss)
        if self._prepared.optimizers:
            yield "lr", self._prepared.optimizers[0].param_groups[0]["lr"]
        if self._counts:
            counts, self._counts = self._counts, []
            yield "tokens", torch.stack(counts).sum()

    def finish(self) -> None:
        """Show the end of the run, with rates of all of it; after an error, leave the line as it was."""
        self._window.stepped.remove(self._stepped)
        self._flops.close()
        if self._progress.updates:
            self._progress.finish(max(optimizer.updates for optimizer in self._prepared.optimizers))
        try:
            if not failing() and self._due < math.inf:
                while self._progress.updates > (self._marks[-1].updates if self._marks else 0):
                    self._look(time.monotonic(), wait=True)
                if self._first is not None:
                    self._show(self._first, ended=True)
        finally:
            self._heard = self._loss = None
            if self._bar is not None:
                self._bar.close()

    # -- the line -----------------------------------------------------------------------------------------------------

    def _show(self, since: Mark, ended: bool = False) -> None:
        """Show the last mark, with rates since another one."""
        mark, first = self._marks[-1], self._first or since
        ahead = self._progress.ahead(mark.updates)
        seconds, made = mark.time - first.time, mark.updates - first.updates
        parts = [*self._position(mark.updates, ahead), *self._values(mark.updates), *self._rates(since, mark)]
        if ended:
            parts.append((1, f"{duration(seconds)} in all"))
        elif ahead.total is not None and made:
            left = duration(seconds * (ahead.total - ahead.done) / made)
            parts.append((1, f"{left} left" + ("" if ahead.whole else " of this epoch")))
        notebook = type(sys.stderr).__module__.startswith("ipykernel")
        if self._bar is None and (notebook or is_terminal(sys.stderr)):
            self._bar = Bar(sys.stderr, notebook)
        if self._bar is not None:
            self._bar.show(parts, ahead)
        else:
            sys.stderr.write(f"{time.strftime('%H:%M:%S')}{GAP}{fitted(parts)}\n")
            sys.stderr.flush()

    def _position(self, updates: int, ahead: Ahead) -> Iterator[Part]:
        epochs, epoch = self._window.epochs, self._progress.epoch
        if epochs is not None:
            yield 1, f"epoch {epochs[0] + 1}/{epochs[1]}"
        elif epoch is not None:
            yield 1, f"epoch {epoch + 1}"
        yield 0, f"step {updates:,}" + (f"/{ahead.total:,}" if ahead.total and ahead.whole else "")

    def _values(self, updates: int) -> Iterator[Part]:
        """The logged values, and the loss and the learning rate where the script logs none."""
        values: dict[str, Any] = {}
        if self._listens and "loss" in self._seen:
            older = f" of step {self._seen['update']:,}" if self._seen["update"] < updates else ""
            values["loss"] = f"{self._seen['loss']:.4g}{older}"
        values |= self._logged
        if "lr" in self._seen and not {"lr", "learning_rate"} & values.keys():
            values["lr"] = self._seen["lr"]
        for place, (name, value) in enumerate(values.items(), 2):
            yield place, f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"

    def _rates(self, since: Mark, mark: Mark) -> Iterator[Part]:
        seconds = mark.time - since.time
        if mark.updates > since.updates and seconds > 0:
            updates = (mark.updates - since.updates) / seconds
            yield 4, f"{rate(updates)} updates/s"
            if mark.tokens > since.tokens:
                yield 3, f"{rate((mark.tokens - since.tokens) / seconds)} tokens/s"
            elif mark.samples and since.samples is not None:
                yield 3, f"{rate((mark.samples - since.samples) / seconds)} samples/s"
            if self._flops.share:
                yield 5, f"MFU {self._flops.share * updates:.1%}"
        device = self._run.world.device
        module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        on_device = hasattr(module, "max_memory_allocated")
        memory = module.max_memory_allocated(device) if on_device else psutil.Process().memory_info().rss
        yield 6, f"memory {size(memory)}"


# -- FLOPs -------------------------------------------------------------------------------------------------------------


class Counter(FlopCounterMode):
    """Remembers in `failed` that a formula did not know the shapes that it got."""

    failed = False

    def _count_flops(self, *args: Any) -> Any:
        try:
            return super()._count_flops(*args)
        except Exception:
            self.failed = True
            return args[1]


class Flops:
    """Counts the FLOPs of one update of this rank, where the peak of its device is known.

    Attributes:
        share: of that peak, at one update a second; 0 where it is not known.
    """

    def __init__(self, run: Any, prepared: Any) -> None:
        self._run, self._prepared = run, prepared
        self._counter: Counter | None = None
        self._peak = self.share = 0.0

    def step(self) -> bool:
        """An update has ended: begin to count, or end it; returns whether the next update's end matters, too."""
        if self._counter is not None:
            self.close()
        elif torch._C._len_torch_dispatch_stack():
            return True  # in a mode that the script has entered, it would leave ours in place of its own
        elif peak := self._known_peak():
            self._peak, self._counter = peak, Counter(display=False)
            self._counter.__enter__()
        return self._counter is not None

    def _known_peak(self) -> float | None:
        plan, device = self._run.plan, self._run.world.device
        policy = PRECISIONS.get(plan.precision.value)
        # Under a counter torch runs the model without torch.compile, and never compiles what it first calls there.
        dynamo = sys.modules.get("torch._dynamo")
        compiles = plan.compiles or (dynamo and dynamo.utils.counters["frames"])
        if policy is None or compiles:
            return None
        hardware = plan.hardware
        chip = hardware.cpu if device.type == "cpu" else hardware.devices[device.index or 0]
        return peak_flops(chip.name, product_type(policy))

    def close(self) -> None:
        if self._counter is not None:
            counter, self._counter = self._counter, None
            counter.__exit__(None, None, None)
            # The layers of tensor parallelism multiply DTensors, and are counted as if whole.
            world, strategy = self._run.world, self._prepared.strategy
            shares = world.size // strategy.data_size if strategy.splits_layers else 1
            self.share = 0.0 if counter.failed else counter.get_total_flops() / shares / self._peak


# -- where the line stands ---------------------------------------------------------------------------------------------


def is_terminal(stream: Any) -> bool:
    return bool(getattr(stream, "isatty", bool)())  # a script's own stream may have `write` only


def fitted(parts: Sequence[Part], columns: float = math.inf) -> str:
    """The texts that fit `columns`, in their order."""
    kept = list(parts)
    while len(kept) > 1 and sum(len(text) + len(GAP) for _, text in kept) > columns:
        kept.remove(max(kept))
    return GAP.join(text for _, text in kept)


class Bar:
    """One line that tqdm updates in place, on a terminal or in a notebook.

    Until `close`, the `write` of the terminal's streams tells it that the script writes, so that this gets lines of its own.
    """

    def __init__(self, stream: Any, notebook: bool) -> None:
        with isolated():  # packages may draw random numbers at import
            tqdm = tqdm_class()

        # Without tqdm's thread, which redraws bars that stand still; and on the last line, where that of an earlier run may stand.
        kind = type("Line", (tqdm,), {"monitor_interval": 0})
        self._bar = kind(file=stream, dynamic_ncols=True, bar_format="{desc}", leave=True, position=0)
        self._shown = True
        self._unfinished = 0.0  # when the script has written a part of a line
        self._write, self._undo = stream.write, ExitStack()
        for own in set() if notebook else {sys.stdout, sys.stderr}:
            if is_terminal(own):
                self._undo.callback(setattr, own, "write", own.write)
                own.write = partial(self._aside, own.write)

    def _aside(self, write: Callable[[str], int], text: str) -> int:
        """Write the script's `text`, after clearing the line; an error leaves the line above."""
        if not text.startswith(("\r", "\x1b")):  # which begin a bar of the script's: tqdm keeps them apart
            if not failing():
                if not self._unfinished:
                    self._write("\r\x1b[K")  # also what a longer bar of the script's has left
            elif self._shown:
                write("\n")
            self._shown = False
            self._unfinished = 0.0 if text.endswith("\n") else time.monotonic()
        return write(text)

    def show(self, parts: Sequence[Part], ahead: Ahead) -> None:
        if self._unfinished:
            if time.monotonic() - self._unfinished < UNFINISHED:
                return
            self._write("\n")
            self._unfinished = 0.0
        bar = self._bar
        bar.n, bar.total = ahead.done, ahead.total
        bar.bar_format = "{percentage:3.0f}%|{bar:10}| {desc}" if ahead.total else "{desc}"
        columns = bar.format_dict["ncols"]
        bar.set_description_str(fitted(parts, columns - 18) if columns else fitted(parts))
        self._shown = True

    def close(self) -> None:
        self._undo.close()
        self._bar.leave = self._shown
        self._bar.close()
