"""A new file from buffers: each block is hashed, piece by piece while it is in the cache, and written by one of a few threads.

Two ways to the disk, both durable when `write` returns. *Through* the page cache: `pwritev` from the buffers themselves, and fsync.
*Past* it (O_DIRECT): each thread copies to `BOUNCE` bytes of aligned memory, or writes from where the bytes are if that is aligned (a
staging image); the unaligned tail goes through the page cache.

Which is quicker depends on the disk and the kernel, so the first file of at least `TRIAL` bytes on a device tries both on its own
first blocks, twice in turn, each time until they are on disk; the better one writes the rest, and all that follows in this process
(past it, unless the other way is quicker by a fifth).
Until then files go through the page cache, and those of one block always.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from queue import SimpleQueue
from time import perf_counter

from ..errors import CheckpointError
from . import calls
from .buffers import Pages
from .checksums import blocks, crc32
from .cutting import address, cut, rest
from .manifest import BLOCK
from .spread import WORKERS, spread
from .storage import Part, Tick

PIECE = 2**20  # bytes that are hashed at once; a core's own cache holds them until they are copied
BOUNCE = 2**23
PAGE = 4096  # a multiple of what file systems ask of O_DIRECT; one that asks more says EINVAL
MOST = 512  # buffers of one call; Linux takes 1024
ROUND = 2  # blocks of one round of the trial
TRIAL = 8 * ROUND * BLOCK
CLEARLY = 0.8  # past the page cache is taken unless this is not enough: it leaves the cache to others, and a trial is a short one
DIRECT = getattr(os, "O_DIRECT", 0)
NO_ROOM_AHEAD = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV)

past_is_quicker: dict[int, bool] = {}
"""By number of the device (`st_dev`): what the trial said."""

Group = list[memoryview]


class Writer:
    """A file that is being written, at `path`; `write` does all of it. Errors of the system (OSError) carry the name; what is written
    by then stays."""

    def __init__(self, path: str, size: int, direct: bool | None = None) -> None:
        self._path, self._size, self._direct = path, size, direct
        self._plain = self._aligned = -1
        self._spare: SimpleQueue[memoryview] = SimpleQueue()
        self._checksums = [0] * blocks(size)
        self._crc32 = crc32()

    def write(self, parts: Iterable[Part], tick: Tick) -> tuple[int, ...]:
        """The CRC-32 of each block, once `parts` are on disk.

        Raises:
            CheckpointError: `parts` are not `size` bytes.
        """
        with ExitStack() as self._open:
            self._plain = self._descriptor("create", os.O_CREAT | os.O_EXCL, 0o666)
            groups = enumerate(self._exactly(cut(parts, BLOCK)))
            if self._size <= BLOCK:
                for task in groups:
                    self._note(self._through(task), tick)
            else:
                calls.do("allocate", self._path, _allocate, self._plain, self._size)
                self._run(self._way(groups, tick), groups, tick)
            self._sync()
        return tuple(self._checksums)

    def _descriptor(self, operation: str, flags: int, *mode: int) -> int:
        """Closed when `write` ends."""
        descriptor = calls.do(
            operation, self._path, os.open, self._path, os.O_WRONLY | os.O_CLOEXEC | flags, *mode
        )
        self._open.callback(calls.do, "close", self._path, os.close, descriptor)
        return descriptor

    def _exactly(self, groups: Iterator[Group]) -> Iterator[Group]:
        total = 0
        for group in groups:
            total += sum(map(len, group))
            if total > self._size:
                break
            yield group
        if total != self._size:
            raise CheckpointError(
                f"{self._path}: the parts are not the {self._size} bytes that were announced"
            )

    # -- which way -----------------------------------------------------------------------------------------------------

    def _way(
        self, groups: Iterator[tuple[int, Group]], tick: Tick
    ) -> Callable[[tuple[int, Group]], tuple[int, int, int]]:
        device = os.fstat(self._plain).st_dev
        known = past_is_quicker.get(device) if self._direct is None else self._direct
        if known is False or (known is None and self._size < TRIAL) or not self._open_aligned(device):
            return self._through
        if known is None:
            seconds = {self._past: float("inf"), self._through: float("inf")}
            for way in (self._past, self._through) * 2:
                start = perf_counter()
                self._run(way, islice(groups, ROUND), tick)
                self._sync()
                seconds[way] = min(seconds[way], perf_counter() - start)
            past_is_quicker[device] = (
                past_is_quicker.get(device, True) and CLEARLY * seconds[self._past] < seconds[self._through]
            )
            known = past_is_quicker[device]
        return self._past if known else self._through

    def _open_aligned(self, device: int) -> bool:
        try:
            if not DIRECT:
                raise OSError(errno.EINVAL, "no O_DIRECT on this system", self._path)
            self._aligned = self._descriptor("open", os.O_NOFOLLOW | DIRECT)
        except OSError as error:
            if self._direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            past_is_quicker[device] = False
            return False
        memory = memoryview(Pages(WORKERS * BOUNCE))
        for at in range(0, len(memory), BOUNCE):
            self._spare.put(memory[at : at + BOUNCE])
        return True

    # -- blocks: (number, its buffers) → (number, CRC-32, bytes) ---------------------------------------------------------

    def _run(
        self,
        way: Callable[[tuple[int, Group]], tuple[int, int, int]],
        groups: Iterable[tuple[int, Group]],
        tick: Tick,
    ) -> None:
        for done in spread(way, groups, "write"):
            self._note(done, tick)

    def _note(self, done: tuple[int, int, int], tick: Tick) -> None:
        number, self._checksums[number], count = done
        tick(count)

    def _through(self, task: tuple[int, Group]) -> tuple[int, int, int]:
        number, group = task
        at, crc = number * BLOCK, 0
        for piece in cut(group, PIECE, MOST):
            for view in piece:
                crc = self._crc32(view, crc)
            at = self._put(piece, at)
        return number, crc, at - number * BLOCK

    def _past(self, task: tuple[int, Group]) -> tuple[int, int, int]:
        number, group = task
        at, crc = number * BLOCK, 0
        bounce = self._spare.get()
        try:
            for chunk in cut(group, BOUNCE):
                source = chunk[0]
                if len(chunk) > 1 or address(source) % PAGE:
                    source = bounce[: sum(map(len, chunk))]
                    end = 0
                    for (piece,) in cut(chunk, PIECE, 1):
                        begin, end = end, end + len(piece)
                        _copy(source[begin:end], piece)
                        crc = self._crc32(source[begin:end], crc)
                else:
                    for (piece,) in cut(chunk, PIECE):
                        crc = self._crc32(piece, crc)
                at = self._put_aligned(source, at)
        finally:
            self._spare.put(bounce)
        return number, crc, at - number * BLOCK

    def _put_aligned(self, source: memoryview, at: int) -> int:
        done, whole = 0, len(source) - len(source) % PAGE
        while done < whole:
            try:
                count = calls.do(
                    "write", self._path, os.pwritev, self._aligned, [source[done:whole]], at + done
                )
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                past_is_quicker[os.fstat(self._plain).st_dev] = False  # it asks for more than our alignment
                break
            done += count - count % PAGE
            if count < PAGE:
                break
        return self._put([source[done:]], at + done)

    def _put(self, group: Group, at: int) -> int:
        while group := [view for view in group if view]:
            count = calls.do("write", self._path, os.pwritev, self._plain, group, at)
            if not count:
                raise OSError(errno.EIO, "the system wrote nothing, and did not say why", self._path)
            at += count
            group = rest(group, count)
        return at

    def _sync(self) -> None:
        calls.do("fsync", self._path, os.fsync, self._plain)


def _copy(target: memoryview, source: memoryview) -> None:
    if source.readonly or len(source) < 2**16:
        target[:] = source
    else:
        ctypes.memmove(
            address(target), address(source), len(source)
        )  # lets other threads run; a slice does not


def _allocate(descriptor: int, size: int) -> None:
    """Room for the whole file, or ENOSPC before its first byte; nothing where the file system has no such call.

    Not `posix_fallocate`: where there is no such call, that writes to every block instead.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None:
        return
    while fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        code = ctypes.get_errno()
        if code in NO_ROOM_AHEAD:
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
