"""Progress of a save or load on the main process's stderr, where it takes longer than two seconds.

There is at most one line every ten seconds, and one at the end. A background save prints nothing; the log says when it
is complete.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from ..base.units import size
from ..distributed import World
from ..errors import redact
from ..logging import get_logger

logger = get_logger(__name__)
SILENT = 2.0  # seconds until anything is shown
REPEATED = 10.0  # seconds between two lines
Tick = Callable[[int], None]  # called with the number of bytes since the last call


def ignore(count: int) -> None:
    """Do nothing: the `Tick` of calls that show no progress."""


def expect(tick: Tick, total: int) -> None:
    """Tell `tick` the total number of bytes, if it shows a share."""
    if isinstance(tick, Progress):
        tick.total = total


class Progress:
    """A callable that counts bytes and shows progress. Use it in a ``with`` block; any thread may call it.

    Args:
        doing: the words during the work, such as ``"saving step-00000100"``.
        done: the words at its end, such as ``"saved step-00000100"``.
        shown: whether this process prints.
        background: whether the program prints meanwhile; the block may then end before the work.
        stream: output; None is sys.stderr.
        clock: seconds.

    Attributes:
        total: all bytes; 0 if unknown.
    """

    def __init__(
        self,
        doing: str,
        done: str,
        shown: bool = True,
        background: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._doing, self._finished = doing, done
        self._shown, self._background = shown, background
        self._stream, self._clock = stream if stream is not None else sys.stderr, clock
        self._lock = threading.Lock()
        self._count = self.total = 0
        self._began = clock()
        self._next_line = self._began + REPEATED

    @classmethod
    def of_ranks(cls, world: World, doing: str, done: str, path: str, background: bool = False) -> Progress:
        """The progress of rank 0, which represents all ranks."""
        share = f" (rank 0 of {world.size})" if world.size > 1 else ""
        return cls(f"{doing} {path}{share}", f"{done} {path}{share}", world.rank == 0, background)

    def __call__(self, count: int) -> None:
        with self._lock:
            self._count += count
            time_now = self._clock()
            if not self._shown:
                return
            if self._background:
                if count and self._count == self.total and time_now - self._began >= SILENT:
                    logger.info("%s", self._summary(time_now))
            elif time_now >= self._next_line:
                self._next_line = time_now + REPEATED
                count = min(self._count, self.total or self._count)  # blocks may be read twice at edges
                share = f" of {size(self.total)} ({count / self.total:.0%})" if self.total else ""
                rate = size(self._count / (time_now - self._began))
                print(f"{redact(self._doing)}: {size(count)}{share}, {rate}/s", file=self._stream, flush=True)

    def _summary(self, time_now: float) -> str:
        seconds = max(time_now - self._began, 1e-9)
        return f"{redact(self._finished)}: {size(self._count)} in {seconds:.1f} s, {size(self._count / seconds)}/s"

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        time_now = self._clock()
        if self._shown and not self._background and error_type is None and time_now - self._began >= SILENT:
            print(self._summary(time_now), file=self._stream, flush=True)
