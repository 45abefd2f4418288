"""An orderly end of a run by SIGTERM or SIGUSR1: it saves, and exits with code 75, all ranks together.

The handler only sets a flag. The run saves and exits at the end of a loop's body, at the same place on all ranks: they
count these places. A signalled rank calls the others' listeners; each answers with the last place that its main thread
passed, and all stop at the first that none had passed. Forked workers of a DataLoader leave SIGUSR1 to their parent; a
SIGTERM ends the worker, and the run fails: schedulers that signal every process of a job should send SIGUSR1.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..base.parts import Part
from ..errors import CheckpointError, RefusedError, redact
from ..logging import get_logger

if TYPE_CHECKING:
    from ..settings import Settings

logger = get_logger(__name__)
SIGNALS = ("SIGTERM", "SIGUSR1")
RESTART = 75  # EX_TEMPFAIL of sysexits.h: start it again. Unlike a bare SIGTERM (143) or an error (1)
SAME_SIGNAL = 5.0  # seconds; a scheduler and a launcher that hand on the same signal do so within less
QUESTION = "passed"  # by which a rank that got a signal asks all for the last place that they passed
PATIENCE = 20.0  # seconds to wait for the other ranks' answers


class Preemption(Part):
    """Saves the run and ends it after a signal, at the end of the first loop body that no rank has ended yet."""

    name = "preemption"

    def __init__(self, save_on_signal: bool | None) -> None:
        self._at_once = bool(save_on_signal)  # else from `resume` on
        self._former_handlers: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._signal: int | None = None
        self._signal_time = 0.0
        self._count = 0  # bodies of loops that have ended
        self._passed = 0  # the last one that was passed
        self._answered: int | None = None  # the answer to other ranks, after which `_passed` may not grow by itself
        self._stop_count: float | None = None  # where all ranks stop

    @classmethod
    def wanted(cls, settings: Settings) -> Preemption | None:
        return None if settings.save_on_signal is False else cls(settings.save_on_signal)

    def begin(self) -> None:
        if not self._at_once:
            self.run.parts.end(self, "batch")  # until a run resumes
        elif not self._start():
            raise RefusedError(
                "save_on_signal=True in a thread: signals reach the main one, so make the Accelerator there"
            )

    def resumed(self) -> None:
        if self._start():
            self.run.parts.begin_again(self, "batch")

    def _start(self) -> bool:
        """Install the handlers; a second call does nothing. False in a thread, where Python allows none."""
        if self._former_handlers:
            return True
        if threading.current_thread() is not threading.main_thread():
            return False
        for name in SIGNALS:
            number = getattr(signal, name, None)
            if number is not None:
                self._former_handlers[number] = signal.signal(number, self._handle)
        if self.run.world.watch is not None:
            self.run.world.watch.told[QUESTION] = self._answer
        return True

    def close(self) -> None:
        for number, handler in self._former_handlers.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._former_handlers.clear()

    # -- the ends of loops' bodies

    def batch(self, loader: Any) -> None:
        if self._former_handlers and self.run.window.outermost is loader and not loader.uneven:
            self._body_ended()

    def epoch_ends(self, epoch: int) -> bool:
        # Inside of a pass the script stops at the next batch.
        if self._former_handlers and not any(loader.position for loader in self.run.prepared.loaders):
            self._body_ended()
        return False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        elapsed = time.monotonic() - self._signal_time
        is_worker = os.getpid() != self._process  # a forked worker of a DataLoader
        if (is_worker and number == signal.SIGTERM) or (self._signal is not None and elapsed > SAME_SIGNAL):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not is_worker and self._signal is None:
            self._signal, self._signal_time = number, time.monotonic()
            former = self._former_handlers.get(number)
            if callable(former):
                former(number, frame)

    def _answer(self) -> str:
        """The number of the last loop body that this rank has passed; the same in each call. Any thread may call it."""
        with self._lock:
            if self._answered is None:
                self._answered = self._passed
            return str(self._answered)

    def _body_ended(self) -> None:
        window = self.run.window
        if window.accumulation != 1 and not window.sync:
            return  # the same on all ranks
        with self._lock:
            self._count += 1
            if self._signal is None and self._answered is None:
                self._passed = self._count
                return
        if self._stop_count is None:
            watch = self.run.world.watch
            answers = [self._count - 1] if watch is None else watch.ask_all(QUESTION, PATIENCE)
            if answers is None:
                logger.warning("a rank does not answer, so the ranks cannot save together: training goes on")
            self._stop_count = float("inf") if answers is None else max(map(int, answers)) + 1
        if self._count < self._stop_count:
            self._passed = self._count
            return
        accelerator = self.accelerator  # all ranks save, close the run and exit together
        try:
            accelerator._settle_saves()
        except CheckpointError as error:  # of an earlier save: this one may succeed
            logger.error("%s", error)
        place = accelerator.save_state()
        accelerator._settle_saves()
        by = f" by signal {self._signal}" if self._signal else ""
        logger.warning("preempted%s: saved %s, and exiting with %d", by, place, RESTART)
        accelerator.close()
        end = SystemExit(RESTART)
        end.add_note(redact(place))  # for the launcher's last line
        raise end
