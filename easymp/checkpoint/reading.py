"""Bytes of a file straight into the memory that wants them; each block that is touched is read whole and verified by the way.

A block is read in pieces by `preadv`: what is wanted goes to its place, the rest to scratch memory, and the piece is hashed while it is
in the cache. Where a piece is wanted in more small runs than one call takes, it goes to scratch and is copied.

Where no checksums are known (files of other programs), what lies before, between and after the wanted pieces is left unread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import SimpleQueue

from ..errors import CheckpointError
from .checksums import blocks, check, crc32
from .manifest import BLOCK
from .spread import WORKERS, spread
from .storage import Tick

PIECE = 2**20
FEW = 32  # runs of a piece that are read in place; below this a run is longer than 32 KiB

Runs = list[tuple[int, memoryview]]  # (place in the file, target), sorted


def by_block(wanted: Sequence[tuple[int, memoryview]], size: int, what: str) -> Iterator[tuple[int, Runs]]:
    """Each block that `wanted` touches, with the runs in it.

    Raises:
        CheckpointError: `wanted` leaves the file, overlaps or is not sorted.
    """
    number, runs, end, limit = -1, [], 0, 0
    for at, view in wanted:
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B") if view.nbytes else memoryview(b"")
        count = len(view)
        if not count:
            continue
        if at < end or at + count > size:
            raise CheckpointError(
                f"{what}: bytes {at} to {at + count} are asked for after byte {end}, of {size}"
            )
        end = at + count
        if end <= limit:  # as thousands of small runs do
            runs.append((at, view))
            continue
        while at < end:
            if at >= limit:
                if runs:
                    yield number, runs
                number, runs = at // BLOCK, []
                limit = (number + 1) * BLOCK
            runs.append((at, view[: limit - at]))
            view, at = view[limit - at :], min(limit, end)
    if runs:
        yield number, runs


class Reader:
    """The file `what` of `size` bytes, with these checksums, of which ``read(views, at)`` fills the views from byte `at` on, or fails."""

    def __init__(
        self,
        what: str,
        size: int,
        checksums: Sequence[int] | None,
        read: Callable[[list[memoryview], int], None],
    ) -> None:
        self._what, self._size, self._checksums, self._read = what, size, checksums, read
        self._crc32 = crc32()
        self._spare: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(WORKERS):
            self._spare.put(memoryview(bytearray(PIECE)))

    def fetch(self, wanted: Sequence[tuple[int, memoryview]], tick: Tick) -> None:
        self._run(by_block(wanted, self._size, self._what), tick)

    def verify(self, tick: Tick, numbers: Iterable[int] | None = None) -> None:
        self._run(
            ((number, []) for number in (range(blocks(self._size)) if numbers is None else numbers)), tick
        )

    def _run(self, tasks: Iterator[tuple[int, Runs]], tick: Tick) -> None:
        for count in spread(self._unchecked if self._checksums is None else self._checked, tasks, "read"):
            tick(count)

    def _checked(self, task: tuple[int, Runs]) -> int:
        number, runs = task
        begin, end = number * BLOCK, min((number + 1) * BLOCK, self._size)
        crc = 0
        for at, stop, targets in _pieces(runs, begin, end):
            crc = self._piece(at, stop, targets, crc)
        check(self._what, number, crc, self._checksums or ())
        return end - begin

    def _unchecked(self, task: tuple[int, Runs]) -> int:
        number, runs = task
        for _, _, targets in _pieces(runs, number * BLOCK, min((number + 1) * BLOCK, self._size)):
            if targets:
                last, view = targets[-1]
                self._piece(targets[0][0], last + len(view), targets)
        return sum(len(view) for _, view in runs)

    def _piece(self, begin: int, end: int, targets: Runs, crc: int | None = None) -> int:
        """Reads ``[begin, end)``; the CRC-32 with it, if one is given."""
        scratch = self._spare.get()
        few = len(targets) <= FEW
        views = _in_place(targets, scratch, begin, end) if few else [scratch[: end - begin]]
        try:
            self._read(views, begin)
            if crc is not None:
                for view in views:
                    crc = self._crc32(view, crc)
            if not few:
                for at, view in targets:
                    view[:] = scratch[at - begin : at - begin + len(view)]
        finally:
            self._spare.put(scratch)
        return crc or 0


def _pieces(runs: Runs, begin: int, end: int) -> Iterator[tuple[int, int, Runs]]:
    """``[begin, end)`` in pieces, each with the parts of `runs` that lie in it."""
    first = 0
    for at in range(begin, end, PIECE):
        stop = min(at + PIECE, end)
        targets = []
        while first < len(runs) and runs[first][0] < stop:
            run = runs[first]
            place, view = run
            end_of_run = place + len(view)
            if place >= at and end_of_run <= stop:
                targets.append(run)
            else:
                targets.append((max(place, at), view[max(at - place, 0) : stop - place]))
            if end_of_run > stop:
                break
            first += 1
        yield at, stop, targets


def _in_place(targets: Runs, scratch: memoryview, begin: int, end: int) -> list[memoryview]:
    """All of ``[begin, end)`` as buffers, in order: the targets, and scratch memory between them."""
    views = []
    at = begin
    for place, view in targets:
        if place > at:
            views.append(scratch[at - begin : place - begin])
        views.append(view)
        at = place + len(view)
    if at < end:
        views.append(scratch[at - begin : end - begin])
    return views
