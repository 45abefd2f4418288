"""Epochs that continue where a checkpoint was taken, and an orderly end of a run by a signal.

Preemption: Slurm, Kubernetes and clouds send SIGTERM before they kill, and ``sbatch --signal=USR1@120`` sends SIGUSR1 some time before.
The handler only sets a flag. The run saves and exits at the end of the body of a training loop (when a prepared loader is asked for its
next batch, or ``epochs()`` for its next epoch), at the same place on all ranks. Without a signal, this costs one uncontended lock.

All ranks stop at the same place because they count these places. A rank that got a signal calls the others' listeners (a thread that
sleeps in the store). Each answers with the number of the last place that its main thread has passed; from then on that thread asks
before it passes one. All stop at the first place that none had passed, so no rank waits in a collective for one that has stopped.

Forked workers of a DataLoader leave SIGUSR1 to their parent. A SIGTERM to a worker ends that worker (torch's handler), and the run fails:
a scheduler that signals every process of a job should send SIGUSR1.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..errors import StepError
from ..logging import get_logger

if TYPE_CHECKING:
    from ..base.accumulation import UpdateWindow
    from ..data import PreparedLoader
    from ..distributed import World

logger = get_logger(__name__)
SIGNALS = ("SIGTERM", "SIGUSR1")
RESTART = 75  # EX_TEMPFAIL of sysexits.h: start it again. Unlike a bare SIGTERM (143) or an error (1)
AGAIN = 5.0  # seconds; a scheduler and a launcher that hand on the same signal do so within less
PATIENCE = 20.0  # seconds to wait for the other ranks' answers


class Epochs:
    """The epochs of ``accelerator.epochs()`` loops, told apart by their order; the state says where the next process continues."""

    def __init__(self, loaders: Sequence[PreparedLoader], window: UpdateWindow) -> None:
        self._loaders, self._window = loaders, window
        self._loop = -1  # the loop that is running, or was the last one
        self._epoch = 0  # the epoch that is running in it, or the next one
        self._inside = False
        self._saved: dict[str, Any] | None = None

    def run(self, count: int) -> Iterator[int]:
        self._loop += 1
        mine, self._epoch, self._inside = self._loop, 0, True
        try:
            while True:
                finished = self._resumed(mine, count)
                if self._epoch >= count or self._loop != mine:
                    return
                for loader, passes in zip(self._loaders, finished or [0] * len(self._loaders)):
                    loader.replay(passes)
                self._window.hold(self._epoch, count)
                yield self._epoch
                self._epoch += 1
                for loader in self._loaders:
                    loader.replay(0)
                # The script is inside a pass: it stops at the next batch.
                if self._window.between is not None and not any(loader.position for loader in self._loaders):
                    self._window.between()
        finally:
            if self._loop == mine:
                self._inside = False

    def _resumed(self, mine: int, count: int) -> list[int]:
        """Continue in the epoch of a loaded checkpoint. Returns the number of finished passes of each loader in it."""
        saved = self._saved
        if saved is None or mine > saved["loop"] >= 0:
            return []
        if mine < saved["loop"]:
            self._epoch = count  # this loop was over
            return []
        self._saved = None
        if saved["loop"] >= 0:
            self._epoch = saved["epoch"]
            return list(saved["finished"])
        if any(loader.epoch or loader.position for loader in self._loaders):
            raise StepError(
                "the checkpoint was saved outside of accelerator.epochs(), so it does not say which epochs are left: use the loop that "
                "the script had then, such as range(first, n)"
            )
        return []

    def state_dict(self) -> dict[str, Any]:
        """The loop, the epoch that the next process begins with, and each loader's finished passes in it."""
        if self._saved is not None and self._saved["loop"] >= self._loop:
            return dict(self._saved)  # loaded, and nothing has run since
        epoch, finished = self._epoch, [0] * len(self._loaders)
        if self._inside:
            if any(loader.position for loader in self._loaders):
                finished = [loader.finished for loader in self._loaders]
            elif any(loader.finished for loader in self._loaders) or not self._loaders:
                epoch += 1
        return {"loop": self._loop, "epoch": epoch, "finished": finished}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes effect in the next round of the running loop, or in the loops to come."""
        finished = [int(n) for n in state["finished"]]
        self._saved = {"loop": int(state["loop"]), "epoch": int(state["epoch"]), "finished": finished}


class Preemption:
    """Listen for signals from `start` to `close`. All ranks call `leave` at the same place, with the number of the signal."""

    def __init__(self, world: World, window: UpdateWindow, leave: Callable[[int | None], None]) -> None:
        self._world, self._window, self._leave = world, window, leave
        self._before: dict[int, Any] = {}  # former handlers
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._signal: int | None = None
        self._since = 0.0
        self._place = 0  # places come to
        self._passed = 0  # the last one that was passed
        self._asked = False  # whether an answer has been given, so that `_passed` may not grow by itself
        self._stop: float | None = None  # where all ranks stop

    def start(self) -> bool:
        """Install the handlers; a second call does nothing. False in a thread, where Python allows none."""
        if self._before:
            return True
        if threading.current_thread() is not threading.main_thread():
            return False
        for name in SIGNALS:
            number = getattr(signal, name, None)
            if number is not None:
                self._before[number] = signal.signal(number, self._note)
        if self._world.watch is not None:
            self._world.watch.heard = self._answer
        self._window.between = self._at_place
        return True

    def close(self) -> None:
        """Put the former handlers back."""
        self._window.between = None
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        child = os.getpid() != self._process  # a forked worker of a DataLoader
        if (child and number == signal.SIGTERM) or (self._signal is not None and now - self._since > AGAIN):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not child and self._signal is None:
            self._signal, self._since = number, now
            before = self._before.get(number)
            if callable(before):
                before(number, frame)

    def _answer(self) -> int | None:
        """Called in the listener's thread: this rank's answer to another one; None if it was given already."""
        with self._lock:
            asked, self._asked = self._asked, True
            return None if asked else self._passed

    def _at_place(self) -> None:
        if self._window.accumulation != 1 and not self._window.sync:
            return  # the same on all ranks
        with self._lock:
            self._place += 1
            if self._signal is None and not self._asked:
                self._passed = self._place
                return
        if self._stop is None:
            self._stop = self._agree()
        if self._place < self._stop:
            self._passed = self._place
            return
        self._leave(self._signal)

    def _agree(self) -> float:
        watch = self._world.watch
        if watch is None:
            return self._place
        mine = self._answer()
        if mine is not None:
            watch.call(mine)
        answers = watch.answers(PATIENCE)
        if answers is None:
            logger.warning("a rank does not answer, so the ranks cannot save together: training goes on")
            return float("inf")
        return max(answers) + 1
