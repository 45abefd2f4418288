"""CRC-32, the one of zip and PNG, by the quickest code that is installed; and what is said when it does not fit."""

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
from .storage import Part, Tick

Buffer = bytes | bytearray | memoryview


@cache
def crc32() -> Callable[[Buffer, int], int]:
    """``crc32(buffer, value so far)``; all give the same value and let other threads run meanwhile.

    zlib is always there; isal and zlib-ng use wider instructions and are imported only when the first block is hashed.
    """
    for module in ("isal.isal_zlib", "zlib_ng.zlib_ng"):
        try:
            return importlib.import_module(module).crc32
        except ImportError:
            continue
    return zlib.crc32


def block_count(size: int) -> int:
    """How many BLOCKs a file of `size` bytes has; the last one may be shorter."""
    return -(-size // BLOCK)


def check(what: str, number: int, found: int, checksums: Sequence[int]) -> None:
    """Raises CheckpointError where block `number` of the file `what` has not the CRC-32 that was stored."""
    if found != checksums[number]:
        raise CheckpointError(
            f"{what}: block {number} (from byte {number * BLOCK}) is not what was written: its CRC-32 is {found:#010x}, not "
            f"{checksums[number]:#010x}. The file is damaged: load another checkpoint, or copy this file again from where it is whole"
        )


def check_size(what: str, found: int | None, size: int, checksums: Sequence[int] | None) -> None:
    """Raises CheckpointError where a file is missing or has not the `size` that was written, or not as many checksums."""
    if found is None:
        raise CheckpointError(
            f"{what}: no such file: the checkpoint is not whole; load another one, or copy this file again"
        )
    if found != size:
        raise CheckpointError(
            f"{what}: {found} bytes, and {size} were written: load another checkpoint, or copy this file again"
        )
    if checksums is not None and len(checksums) != block_count(size):
        raise CheckpointError(
            f"{what}: {len(checksums)} checksums for {block_count(size)} blocks: load another checkpoint"
        )


# -- Rows of buffers, cut to measure without copies.


def cut(
    parts: Iterable[bytes | memoryview], step: int, most: int = sys.maxsize
) -> Iterator[list[memoryview]]:
    """The bytes of `parts` in groups of `step` bytes, or of `most` buffers where that comes first; the last group may be shorter."""
    group: list[memoryview] = []
    room = step
    for part in parts:
        view = memoryview(part)
        if not view.nbytes:
            continue  # which cannot be cast, if it has more than one dimension
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


def rest(group: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `group` after its first `count` bytes."""
    for i, view in enumerate(group):
        if count < len(view):
            return [view[count:], *group[i + 1 :]]
        count -= len(view)
    return []


def address(view: memoryview) -> int:
    """Where in memory; odd, which is never aligned, where it is read-only and ctypes does not say."""
    return 1 if view.readonly else ctypes.addressof(ctypes.c_char.from_buffer(view))


# -- The memory of tensors as plain bytes, and memory that disks and GPUs take as it is.


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, as one writable row of bytes, of any dtype; no copy.

    The view keeps that memory alive, and what is written to it is the tensor's value at once (autograd is not told).

    Raises:
        CheckpointError: a tensor whose memory is not its value: elsewhere, with gaps, or conjugated or negated by a flag.
    """
    if (
        tensor.layout is not torch.strided
        or not tensor.is_cpu
        or not tensor.is_contiguous()
        or tensor.is_conj()
        or tensor.is_neg()
    ):
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
    """Private memory of the kernel, zero; given back, and taken back from CUDA, when nothing reads it any more.

    The kernel clears each page at its first touch, which is dear, so huge ones are asked for.
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
    """`size` bytes that begin on a page, as uint8, zero; pinned where this process uses CUDA (`is_pinned` says). To be kept and used again.

    It is registered with CUDA rather than taken from torch's pinned pool, which rounds up to a power of two: up to twice the
    memory for a staging image.
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


# -- A few threads for the blocks of one file: hashing, reads and writes let the interpreter go, so two cores work at once.


R = TypeVar("R")
WORKERS = 3  # one more than hash at the same time on 2 cores, so that the disk always has something to do


def spread(function: Callable[[T], R], items: Iterable[T], name: str) -> Iterator[R]:
    """``function(item)`` for each item, on WORKERS threads: the results as they are done, in any order.

    `items` is drawn from on the calling thread, a few ahead of what is done. The first error is raised here, after what runs has
    ended. Plain threads, as the pools of `concurrent.futures` take no more work once the interpreter ends, and a save may still run.
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


# -- Bytes of a file straight into the memory that wants them; each block that is touched is read whole and verified by the way.


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
            ((number, []) for number in (range(block_count(self._size)) if numbers is None else numbers)),
            tick,
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


# -- A new file from buffers: each block is hashed, piece by piece while it is in the cache, and written by one of a few threads.


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
        self._checksums = [0] * block_count(size)
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
                do("allocate", self._path, _allocate, self._plain, self._size)
                self._run(self._way(groups, tick), groups, tick)
            self._sync()
        return tuple(self._checksums)

    def _descriptor(self, operation: str, flags: int, *mode: int) -> int:
        """Closed when `write` ends."""
        descriptor = do(operation, self._path, os.open, self._path, os.O_WRONLY | os.O_CLOEXEC | flags, *mode)
        self._open.callback(do, "close", self._path, os.close, descriptor)
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
                count = do("write", self._path, os.pwritev, self._aligned, [source[done:whole]], at + done)
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
            count = do("write", self._path, os.pwritev, self._plain, group, at)
            if not count:
                raise OSError(errno.EIO, "the system wrote nothing, and did not say why", self._path)
            at += count
            group = rest(group, count)
        return at

    def _sync(self) -> None:
        do("fsync", self._path, os.fsync, self._plain)


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


# -- The one door between checkpoints and the operating system: every call that reads or changes files goes through `do`.


CHANGES = frozenset(
    (
        "mkdir",
        "create",
        "allocate",
        "write",
        "fsync",
        "fsync directory",
        "rename",
        "exchange",
        "replace",
        "copy",
        "unlink",
        "rmdir",
    )
)
T = TypeVar("T")


def do(operation: str, path: str, call: Callable[..., T], *arguments: Any) -> T:
    """``call(*arguments)``, an `operation` of the table above on the file or folder `path`, which an OSError then names."""
    try:
        return call(*arguments)
    except OSError as error:
        if (
            error.filename is None and error.errno is not None
        ):  # without a number, a name would take the place of its words
            error.filename = path
        raise
