"""Files in blocks of 16 MiB, each with its CRC-32: how they are written and read, by a few threads.

Writing: each block is hashed piece by piece while it is in the cache, and written either through the page cache (`pwritev` from the
buffers themselves) or past it (O_DIRECT, from aligned memory; the unaligned tail goes through the cache). Both are durable when `write`
returns. Which is quicker depends on disk and kernel, so the first file of at least `TRIAL` bytes on a device tries both on its own first
blocks, twice in turn; the better one writes the rest, and all that follows in this process (past the cache, unless the other is quicker by
a fifth). Until then files go through the cache, and those of one block always.

Reading: a block is read by `preadv` in pieces. Wanted bytes go straight to their place, the rest to scratch memory, and the piece is hashed
while it is in the cache. Where no checksums are known (files of other programs), bytes outside of the wanted ones are left unread.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import mmap
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import islice
from queue import SimpleQueue
from threading import Thread
from time import perf_counter
from typing import Any, TypeVar, cast

import torch

from ..errors import CheckpointError
from .manifest import BLOCK

PIECE = 2**20  # bytes that are hashed at once; a core's own cache holds them
PAGE = 4096  # a multiple of what file systems ask of O_DIRECT; one that asks more says EINVAL
BOUNCE = 2**23  # bytes of aligned memory of a thread that writes past the page cache
MOST = 512  # buffers of one call; Linux takes 1024
FEW = 32  # runs of a piece that are read in place; below this a run is longer than 32 KiB
WORKERS = 3  # one more than hash at the same time on 2 cores, so that the disk always has something to do
ROUND = 2  # blocks of one round of the trial
TRIAL = 8 * ROUND * BLOCK
CLEARLY = 0.8  # past the page cache is taken unless this is not enough: it leaves the cache to others
DIRECT = getattr(os, "O_DIRECT", 0)
NO_ROOM_AHEAD = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV)

past_is_quicker: dict[int, bool] = {}
"""Result of the trial by device (`st_dev`)."""

T = TypeVar("T")
R = TypeVar("R")
Part = bytes | memoryview
Views = list[memoryview]
Runs = list[tuple[int, memoryview]]  # (place in the file, target), sorted
Tick = Callable[[int], None]  # told how many more bytes are done


def no_tick(count: int) -> None:
    """A tick that tells no one."""


def do(operation: str, path: str, call: Callable[..., T], *arguments: Any) -> T:
    """``call(*arguments)``, an `operation` on the file or folder `path`, which an OSError then names.

    Every call of checkpoints to the operating system and to fsspec goes through here, from several threads at once. Tests replace this
    function to kill the process at any call, to fail one, to shorten a write, or to record the order.
    """
    try:
        return call(*arguments)
    except OSError as error:
        if (
            error.filename is None and error.errno is not None
        ):  # without a number, a name would replace its words
            error.filename = path
        raise


# -- checksums --------------------------------------------------------------------------------------------------------


@cache
def crc32() -> Callable[[bytes | bytearray | memoryview, int], int]:
    """``crc32(buffer, value so far)`` of the fastest installed package; all give the same value and release the GIL."""
    for module in ("isal.isal_zlib", "zlib_ng.zlib_ng"):
        try:
            return importlib.import_module(module).crc32
        except ImportError:
            continue
    return zlib.crc32


def block_count(size: int) -> int:
    """Blocks in a file of `size` bytes; the last one may be shorter."""
    return -(-size // BLOCK)


def check(what: str, number: int, found: int, checksums: Sequence[int]) -> None:
    """Raises CheckpointError where block `number` of the file `what` has another CRC-32 than the stored one."""
    if found != checksums[number]:
        raise CheckpointError(
            f"{what}: block {number} (from byte {number * BLOCK}) is not what was written: its CRC-32 is {found:#010x}, not "
            f"{checksums[number]:#010x}. The file is damaged: load another checkpoint, or copy this file again from an intact one"
        )


def check_size(what: str, found: int | None, size: int, checksums: Sequence[int] | None) -> None:
    """Raises CheckpointError where a file is missing or has another size, or another number of checksums."""
    if found is None:
        raise CheckpointError(
            f"{what}: no such file: the checkpoint is incomplete; load another one, or copy this file again"
        )
    if found != size:
        raise CheckpointError(
            f"{what}: {found} bytes, and {size} were written: load another checkpoint, or copy this file again"
        )
    if checksums is not None and len(checksums) != block_count(size):
        raise CheckpointError(
            f"{what}: {len(checksums)} checksums for {block_count(size)} blocks: load another checkpoint"
        )


# -- memory -----------------------------------------------------------------------------------------------------------


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as writable bytes, without a copy. The view keeps the memory alive.

    Raises:
        CheckpointError: a tensor whose memory is not its value: on another device, with gaps, or conjugated or negated by a flag.
    """
    plain = tensor.layout is torch.strided and tensor.is_cpu and tensor.is_contiguous()
    if not plain or tensor.is_conj() or tensor.is_neg():
        raise CheckpointError(
            f"a tensor {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device} has no plain bytes on the CPU: "
            "pass tensor.resolve_conj().resolve_neg().cpu().contiguous()"
        )
    size = tensor.numel() * tensor.itemsize
    if not size:
        return memoryview(bytearray())
    memory = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    memory.tensor = tensor.detach()  # the view holds `memory`, which holds the tensor's storage
    return memoryview(memory).cast("B")


class Pages(mmap.mmap):
    """Private memory of the kernel, zero; freed, and taken back from CUDA, when nothing reads it any more.

    The kernel clears each page at its first touch, which is slow, so huge ones are asked for.
    """

    registered = 0  # its address, where CUDA knows it

    def __new__(cls, size: int) -> Pages:
        pages = super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                pages.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without them
        return pages

    def __del__(self) -> None:
        if self.registered:
            torch.cuda.cudart().cudaHostUnregister(self.registered)  # before mmap's own end, which unmaps


def aligned(size: int) -> torch.Tensor:
    """`size` zero bytes from the start of a page, as uint8; pinned where this process uses CUDA. Keep it and use it again.

    It is registered with CUDA rather than taken from torch's pinned pool, which rounds up to a power of two.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    pages = Pages(size)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        runtime = torch.cuda.cudart()
        if runtime.cudaHostRegister(memory.data_ptr(), size, 0) == runtime.cudaError.success:
            pages.registered = memory.data_ptr()
    return memory


def address(view: memoryview) -> int:
    """Where in memory; 1, which is never aligned, where it is read-only and ctypes does not say."""
    return 1 if view.readonly else ctypes.addressof(ctypes.c_char.from_buffer(view))


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes; large ones let other threads run meanwhile, which a slice does not."""
    if source.readonly or len(source) < 2**16:
        target[:] = source
    else:
        ctypes.memmove(address(target), address(source), len(source))


def cut(parts: Iterable[Part], step: int, most: int = sys.maxsize) -> Iterator[Views]:
    """The bytes of `parts` in groups of `step` bytes, or of `most` buffers where that comes first; the last may be shorter."""
    group: Views = []
    room = step
    for part in parts:
        view = memoryview(part)
        if not view.nbytes:
            continue  # it can't be cast if it has more than one dimension
        view = view.cast("B")
        at = 0
        while at < len(view):
            group.append(view[at : at + room])
            at += len(group[-1])
            room -= len(group[-1])
            if not room or len(group) == most:
                yield group
                group, room = [], step
    if group:
        yield group


def rest(group: Views, count: int) -> Views:
    """`group` without its first `count` bytes, and without empty views."""
    left = []
    for view in group:
        if count < len(view):
            left.append(view[count:])
        count = max(count - len(view), 0)
    return left


def spread(function: Callable[[T], R], items: Iterable[T], name: str) -> Iterator[R]:
    """``function(item)`` for each item, on WORKERS threads: the results as they are done, in any order.

    `items` is drawn from on the calling thread, a few ahead. The first error is raised here, after the running calls have ended. Plain
    threads, as the pools of `concurrent.futures` take no work once the interpreter ends, and a save may still run then.
    """
    tasks: SimpleQueue[tuple[T] | None] = SimpleQueue()
    done: SimpleQueue[tuple[R | None, BaseException | None]] = SimpleQueue()

    def work() -> None:
        while (task := tasks.get()) is not None:
            try:
                done.put((function(*task), None))
            except BaseException as error:
                done.put((None, error))

    def result() -> R:
        value, error = done.get()
        if error is not None:
            raise error
        return cast(R, value)

    threads: list[Thread] = []
    running = 0
    try:
        for item in items:
            if len(threads) < WORKERS:
                thread = Thread(target=work, name=f"easymp-{name}", daemon=True)
                try:
                    thread.start()
                    threads.append(thread)
                except RuntimeError:  # no more threads here, or the interpreter ends
                    if not threads:
                        yield function(item)
                        continue
            tasks.put((item,))
            running += 1
            if running > WORKERS:
                yield result()
                running -= 1
        for _ in range(running):
            yield result()
    finally:
        for _ in threads:
            tasks.put(None)
        for thread in threads:
            thread.join()


# -- writing ----------------------------------------------------------------------------------------------------------

Task = tuple[int, Views]  # a block's number and its buffers
Done = tuple[int, int, int]  # a block's number, CRC-32 and bytes


class Writer:
    """A new file of `size` bytes at `path`; `write` does all of it. What is written when it fails stays.

    Args:
        direct: past the page cache, or through it; None for the quicker one.
    """

    def __init__(self, path: str, size: int, direct: bool | None = None) -> None:
        self._path, self._size, self._direct = path, size, direct
        self._plain = self._aligned = -1  # descriptors
        self._spare: SimpleQueue[memoryview] = SimpleQueue()
        self._checksums = [0] * block_count(size)
        self._crc32 = crc32()

    def write(self, parts: Iterable[Part], tick: Tick) -> tuple[int, ...]:
        """The CRC-32 of each block, once `parts` are on disk.

        Raises:
            CheckpointError: `parts` are not `size` bytes.
        """
        with ExitStack() as self._open:
            self._plain = self._descriptor("create", os.O_CREAT | os.O_EXCL, 0o666)
            tasks = enumerate(self._exactly(cut(parts, BLOCK)))
            if self._size <= BLOCK:
                self._note(map(self._through, tasks), tick)
            else:
                do("allocate", self._path, _allocate, self._plain, self._size)
                self._note(spread(self._choose(tasks, tick), tasks, "write"), tick)
            self._sync()
        return tuple(self._checksums)

    def _descriptor(self, operation: str, flags: int, *mode: int) -> int:
        descriptor = do(operation, self._path, os.open, self._path, os.O_WRONLY | os.O_CLOEXEC | flags, *mode)
        self._open.callback(do, "close", self._path, os.close, descriptor)
        return descriptor

    def _exactly(self, groups: Iterator[Views]) -> Iterator[Views]:
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

    def _note(self, done: Iterable[Done], tick: Tick) -> None:
        for number, checksum, count in done:
            self._checksums[number] = checksum
            tick(count)

    def _sync(self) -> None:
        do("fsync", self._path, os.fsync, self._plain)

    def _choose(self, tasks: Iterator[Task], tick: Tick) -> Callable[[Task], Done]:
        """The way that writes the blocks; a trial writes the first of them."""
        device = os.fstat(self._plain).st_dev
        past = past_is_quicker.get(device) if self._direct is None else self._direct
        if past is False or (past is None and self._size < TRIAL) or not self._open_aligned(device):
            return self._through
        if past is None:
            seconds = {self._past: float("inf"), self._through: float("inf")}
            for way in (self._past, self._through) * 2:
                start = perf_counter()
                self._note(spread(way, islice(tasks, ROUND), "write"), tick)
                self._sync()
                seconds[way] = min(seconds[way], perf_counter() - start)
            quicker = CLEARLY * seconds[self._past] < seconds[self._through]
            past = past_is_quicker[device] = past_is_quicker.get(device, True) and quicker
        return self._past if past else self._through

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

    def _through(self, task: Task) -> Done:
        number, group = task
        at, crc = number * BLOCK, 0
        for piece in cut(group, PIECE, MOST):
            for view in piece:
                crc = self._crc32(view, crc)
            at = self._put(piece, at)
        return number, crc, at - number * BLOCK

    def _past(self, task: Task) -> Done:
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
                        copy(source[begin:end], piece)
                        crc = self._crc32(source[begin:end], crc)
                else:
                    for (piece,) in cut(chunk, PIECE):
                        crc = self._crc32(piece, crc)
                at = self._put_aligned(source, at)
        finally:
            self._spare.put(bounce)
        return number, crc, at - number * BLOCK

    def _put_aligned(self, source: memoryview, at: int) -> int:
        done, end = 0, len(source) - len(source) % PAGE
        while done < end:
            try:
                count = do("write", self._path, os.pwritev, self._aligned, [source[done:end]], at + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                past_is_quicker[os.fstat(self._plain).st_dev] = False  # it asks for more than our alignment
                break
            done += count - count % PAGE
            if count < PAGE:
                break
        return self._put([source[done:]], at + done)

    def _put(self, group: Views, at: int) -> int:
        while group := rest(group, 0):
            count = do("write", self._path, os.pwritev, self._plain, group, at)
            if not count:
                raise OSError(errno.EIO, "the system wrote nothing, and did not say why", self._path)
            at += count
            group = rest(group, count)
        return at


def _allocate(descriptor: int, size: int) -> None:
    """Room for the whole file, or ENOSPC before its first byte; nothing where the file system has no such call.

    Not `posix_fallocate`: where there is no such call, that writes to every block instead.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    while fallocate is not None and fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        code = ctypes.get_errno()
        if code in NO_ROOM_AHEAD:
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


# -- reading ----------------------------------------------------------------------------------------------------------


def by_block(wanted: Sequence[tuple[int, memoryview]], size: int, what: str) -> Iterator[tuple[int, Runs]]:
    """Each block that `wanted` touches, with the runs in it.

    Raises:
        CheckpointError: `wanted` leaves the file, overlaps or is not sorted.
    """
    number, runs, end, limit = -1, [], 0, 0
    for at, view in wanted:
        if not view.nbytes:
            continue
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B")
        if at < end or at + len(view) > size:
            raise CheckpointError(
                f"{what}: bytes {at} to {at + len(view)} are asked for after byte {end}, of {size}"
            )
        end = at + len(view)
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
    """The file `what` of `size` bytes, with these checksums; ``read(views, at)`` fills the views from byte `at` on, or fails."""

    def __init__(
        self, what: str, size: int, checksums: Sequence[int] | None, read: Callable[[Views, int], None]
    ) -> None:
        self._what, self._size, self._checksums, self._read = what, size, checksums, read
        self._crc32 = crc32()
        self._spare: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(WORKERS):
            self._spare.put(memoryview(bytearray(PIECE)))

    def run(self, tasks: Iterable[tuple[int, Runs]], tick: Tick) -> None:
        """Read these blocks, verified where checksums are known; the runs are filled."""
        for count in spread(self._block, tasks, "read"):
            tick(count)

    def _block(self, task: tuple[int, Runs]) -> int:
        number, runs = task
        begin, end = number * BLOCK, min((number + 1) * BLOCK, self._size)
        if self._checksums is None:
            for _, _, targets in _pieces(runs, begin, end):
                if targets:
                    last, view = targets[-1]
                    self._piece(targets[0][0], last + len(view), targets)
            return sum(len(view) for _, view in runs)
        crc = 0
        for at, stop, targets in _pieces(runs, begin, end):
            crc = self._piece(at, stop, targets, crc)
        check(self._what, number, crc, self._checksums)
        return end - begin

    def _piece(self, begin: int, end: int, targets: Runs, crc: int | None = None) -> int:
        """Read ``[begin, end)``; the CRC-32 with it, if one is given."""
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
            place, view = runs[first]
            after = place + len(view)
            inside = place >= at and after <= stop
            targets.append(
                runs[first] if inside else (max(place, at), view[max(at - place, 0) : stop - place])
            )
            if after > stop:
                break
            first += 1
        yield at, stop, targets


def _in_place(targets: Runs, scratch: memoryview, begin: int, end: int) -> Views:
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
