"""Progress of a save or load that takes longer than two seconds, on the main process's stderr.

A terminal shows one line that is rewritten. Elsewhere there is at most one line every ten seconds, and one at the end. A background save
draws nothing; one line of the log says when it is complete.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from ..base.units import size
from ..distributed import World
from ..logging import get_logger
from .storage import Tick, shown

logger = get_logger(__name__)

SILENT = 2.0  # seconds until anything is said
REDRAWN = 0.2  # seconds between two states of a terminal's line
REPEATED = 10.0  # seconds between two lines elsewhere


class Progress:
    """A callable that counts bytes and shows progress. Use it in a ``with`` block; any thread may call it.

    Args:
        doing: the words during the work, such as ``"saving step-00000100"``.
        done: the words at its end, such as ``"saved step-00000100"``.
        shown: whether this process prints.
        background: whether the program prints meanwhile; the block may then end before the work.
        stream: output; None is sys.stderr.
        clock: seconds.
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
        self._doing, self._done, self._shown, self._background = doing, done, shown, background
        self._stream, self._clock = stream if stream is not None else sys.stderr, clock
        self._lock = threading.Lock()
        self._count, self._total = 0, 0
        self._began = clock()
        self._terminal = self._stream.isatty()
        self._next = self._began + (SILENT if self._terminal else REPEATED)
        self._drawn = 0  # characters of the line that stands there

    def __call__(self, count: int) -> None:
        with self._lock:
            self._count += count
            now = self._clock()
            if not self._shown:
                return
            if self._background:
                if count and self._count == self._total and now - self._began >= SILENT:
                    logger.info("%s", self._end(now))
            elif now >= self._next:
                self._next = now + (REDRAWN if self._terminal else REPEATED)
                self._draw(now)

    def expect(self, total: int) -> None:
        """Set the number of bytes that all calls together will report."""
        with self._lock:
            self._total = total

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        now = self._clock()
        if self._background or not self._shown:
            return
        if self._drawn:
            self._stream.write(f"\r{'':<{self._drawn}}\r")
            self._stream.flush()
        if kind is None and now - self._began >= SILENT:
            print(self._end(now), file=self._stream, flush=True)

    def _end(self, now: float) -> str:
        return f"{self._done}: {size(self._count)} in {now - self._began:.1f} s, {self._rate(now)}"

    def _rate(self, now: float) -> str:
        return f"{size(self._count / max(now - self._began, 1e-9))}/s"

    def _draw(self, now: float) -> None:
        total, count = (
            self._total,
            min(self._count, self._total or self._count),
        )  # blocks may be read twice at edges
        share = f" of {size(total)} ({count / total:.0%})" if total else ""
        text = f"{self._doing}: {size(count)}{share}, {self._rate(now)}"
        if not self._terminal:
            print(text, file=self._stream, flush=True)
            return
        text = text[: shutil.get_terminal_size().columns - 1]  # a line that wraps cannot be rewritten
        self._stream.write(f"\r{text:<{self._drawn}}")
        self._stream.flush()
        self._drawn = len(text)


def of_ranks(world: World, doing: str, done: str, place: str, background: bool = False) -> Progress:
    """The progress of rank 0, which represents all ranks."""
    place = shown(place)
    share = f" (rank 0 of {world.size})" if world.size > 1 else ""
    return Progress(f"{doing} {place}{share}", f"{done} {place}{share}", world.rank == 0, background)


def expect(tick: Tick, total: int) -> None:
    """Tell `tick` the total number of bytes, if it has a method for that."""
    if isinstance(tick, Progress):
        tick.expect(total)
