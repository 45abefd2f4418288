"""The interface of a folder of checkpoints, local or behind a URL; the memory, threads and progress of reads and writes."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import re
import shutil
import sys
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from queue import SimpleQueue
from threading import Thread
from typing import Any, TextIO, TypeVar

import torch

from ..base.units import size
from ..distributed import World
from ..errors import CheckpointError
from ..logging import get_logger
from .manifest import BLOCK

logger = get_logger(__name__)
PATH = re.compile(r"(?:(?!\.{1,2}(?:/|\Z))[^/\0]+(?:/(?=[^/])|\Z))*", re.DOTALL)
"""Names below a folder. They may come from a manifest, so none leads out of it."""
PIECE = 2**20  # bytes that are hashed at once; a core's own cache holds them
WORKERS = 3  # one more than hash at the same time on 2 cores, so that the disk always has work

T = TypeVar("T")
R = TypeVar("R")
Part = bytes | memoryview
Views = list[memoryview]
Runs = list[tuple[int, memoryview]]  # (place in the file, target), sorted
Tick = Callable[[int], None]  # told how many more bytes are done


def shown(place: str) -> str:
    """A path or URL for messages: a password in it is left out."""
    return re.sub(r"(://[^/@:]*):[^/@]*@", r"\1:***@", place)


def no_tick(count: int) -> None:
    """Count nothing."""


@dataclass(frozen=True)
class SourceFile:
    """A file to read; `checksums` has one value for each BLOCK, or is None for a file of another program."""

    storage: Storage
    name: str
    size: int
    checksums: Sequence[int] | None = None

    def __str__(self) -> str:
        return f"{self.storage.place.rstrip('/')}/{self.name}"

    def fetch(self, wanted: Sequence[tuple[int, memoryview]], tick: Tick = no_tick) -> None:
        """Fill each buffer of `wanted` (place in the file, target; sorted, disjoint) and verify every BLOCK that is touched."""
        self.storage.read(self, by_block(wanted, self.size, str(self)), tick)

    def verify(self, tick: Tick = no_tick, numbers: Iterable[int] | None = None) -> None:
        """Read and check these blocks, or all; raises as `fetch`."""
        chosen = range(block_count(self.size)) if numbers is None else numbers
        self.storage.read(self, ((number, []) for number in chosen), tick)

    def check_size(self, found: int | None) -> None:
        """Raises CheckpointError where the file is missing (None) or has another size, or another number of checksums."""
        count = block_count(self.size)
        if found is None:
            said = "no such file: the checkpoint is incomplete"
        elif found != self.size:
            said = f"{found} bytes, and {self.size} were written"
        elif self.checksums is not None and len(self.checksums) != count:
            said = f"{len(self.checksums)} checksums for {count} blocks"
        else:
            return
        raise CheckpointError(f"{self}: {said}: load another checkpoint, or copy this file again")

    def check(self, number: int, found: int) -> None:
        """Raise CheckpointError if block `number` does not have the stored CRC-32."""
        if self.checksums is not None and found != self.checksums[number]:
            raise CheckpointError(
                f"{self}: block {number} (from byte {number * BLOCK}) is not what was written: its CRC-32 is {found:#010x}, not "
                f"{self.checksums[number]:#010x}. The file is damaged: load another checkpoint, or copy this file again"
            )


class Storage(ABC):
    """A folder, at `place`. Names in it have ``/`` between words. Errors of the operating system (OSError) pass through.

    `renames`: whether a folder can be renamed atomically. Elsewhere only COMMIT says whether a checkpoint exists.
    """

    place: str
    renames: bool

    def refusal(self, name: str) -> CheckpointError:
        """The error for a name that PATH does not match."""
        return CheckpointError(f"{name!r} is not a file's name below {self.place}: use words with / between")

    # -- contents

    @abstractmethod
    def put(self, name: str, parts: Iterable[Part], size: int, tick: Tick = no_tick) -> tuple[int, ...]:
        """Write a new file of `size` bytes, durably; returns the CRC-32 of each BLOCK. An existing file is an error."""

    @abstractmethod
    def head(self, name: str, count: int) -> bytes:
        """The first `count` bytes of a file, or all where it has fewer."""

    def get(self, name: str, limit: int) -> bytes:
        """A whole small file; one of more than `limit` bytes is a CheckpointError."""
        content = self.head(name, limit + 1)
        if len(content) > limit:
            raise CheckpointError(f"{self.place}/{name}: more than {limit} bytes, which easymp never writes")
        return content

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of a regular file; None where there is none."""

    @abstractmethod
    def read(self, file: SourceFile, tasks: Iterable[tuple[int, Runs]], tick: Tick) -> None:
        """Read and check blocks of a file, for `SourceFile`: their numbers, and the runs to fill in each."""

    @abstractmethod
    def held(self) -> AbstractContextManager[bool]:
        """A context in which files stay open; its value says whether a second read is cheap."""

    # -- names

    @abstractmethod
    def path(self, name: str) -> str | None:
        """The local path of a file or folder; None behind a URL."""

    @abstractmethod
    def list(self, folder: str = "") -> list[str]:
        """Sorted names of files and folders right in `folder`; none where there is no such folder."""

    @abstractmethod
    def modified(self, name: str) -> float:
        """When a file or folder was last written to, in seconds since the epoch."""

    @abstractmethod
    def make(self, folder: str) -> None:
        """Make a folder and its parents; raise FileExistsError if it exists."""

    @abstractmethod
    def sync(self, folder: str = "") -> None:
        """Make changes of the names in `folder` durable."""

    @abstractmethod
    def move(self, old: str, new: str) -> None:
        """Rename a checkpoint's folder, by copies if the storage cannot rename. A kill leaves at least one with COMMIT."""

    @abstractmethod
    def replace(self, name: str, content: bytes) -> None:
        """Replace a small file's content, atomically and durably."""

    @abstractmethod
    def remove(self, folder: str) -> None:
        """Remove a file, or a folder with its content, COMMIT first. A missing one is ignored."""

    # -- names, only where `renames`

    def rename(self, old: str, new: str) -> None:
        """Rename a folder atomically; `new` does not exist."""
        raise NotImplementedError

    def supplant(self, old: str, new: str) -> None:
        """Rename a file atomically, replacing an existing one."""
        raise NotImplementedError

    def exchange(self, one: str, other: str) -> bool:
        """Swap the names of two folders atomically; False where the file system cannot."""
        raise NotImplementedError


# -- blocks ------------------------------------------------------------------------------------------------------------


@cache
def crc32() -> Callable[[bytes | bytearray | memoryview, int], int]:
    """``crc32(buffer, previous value)`` from the fastest installed package. All give the same value and release the GIL."""
    for module in ("isal.isal_zlib", "zlib_ng.zlib_ng"):
        try:
            return importlib.import_module(module).crc32
        except ImportError:
            continue
    return zlib.crc32


def block_count(size: int) -> int:
    """Blocks in a file of `size` bytes; the last one may be shorter."""
    return -(-size // BLOCK)


def by_block(wanted: Sequence[tuple[int, memoryview]], size: int, what: str) -> Iterator[tuple[int, Runs]]:
    """Yield each block that `wanted` touches, with the runs in it."""
    number, runs, end, limit = -1, [], 0, 0
    for at, view in wanted:
        if not view.nbytes:
            continue
        if at < end or at + view.nbytes > size:
            raise CheckpointError(f"{what}: bytes {at} to {at + view.nbytes} are behind byte {end} of {size}")
        end = at + view.nbytes
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


def cut(parts: Iterable[Part], step: int, most: int = sys.maxsize) -> Iterator[Views]:
    """Yield the bytes of `parts` in groups of `step` bytes or `most` buffers, the smaller of the two."""
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


def exactly(groups: Iterable[Views], size: int, what: str) -> Iterator[Views]:
    """Yield `groups`; raise CheckpointError if they do not have `size` bytes together, before any surplus byte is yielded."""
    total = 0
    for group in groups:
        total += sum(map(len, group))
        if total > size:
            break
        yield group
    if total != size:
        raise CheckpointError(f"{what}: the parts are not the {size} bytes that were announced")


# -- memory and threads ------------------------------------------------------------------------------------------------


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """A writable view of a contiguous CPU tensor's memory, without a copy. The view keeps the memory alive."""
    if not is_plain(tensor):
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


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory holds its values row-major, so that it can be written as it is."""
    strided = tensor.layout is torch.strided and tensor.is_cpu and tensor.is_contiguous()
    return strided and not tensor.is_conj() and not tensor.is_neg()


class Pages(mmap.mmap):
    """Zeroed memory from the kernel, in huge pages, whose first touch is cheap; unregistered from CUDA when its last view is gone."""

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
    """Page-aligned zero bytes as uint8, pinned (not from torch's pool of powers of two) if this process uses CUDA. Reuse it: it is slow."""
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
    """The address of a buffer; 1, which is never aligned, for a read-only view, whose address ctypes does not tell."""
    return 1 if view.readonly else ctypes.addressof(ctypes.c_char.from_buffer(view))


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes. Large copies release the GIL, which a slice assignment does not."""
    if source.readonly or len(source) < 2**16:
        target[:] = source
    else:
        ctypes.memmove(address(target), address(source), len(source))


def spread(function: Callable[[T], R], items: Iterable[T], name: str) -> Iterator[R]:
    """Run ``function(item)`` for each item on WORKERS threads, and yield results in the order of completion; the first error is raised.

    `items` is iterated in the calling thread. Plain threads, since `concurrent.futures` takes no work while the interpreter shuts down.
    """
    tasks: SimpleQueue[tuple[T] | None] = SimpleQueue()
    done: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

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
        return value

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


# -- progress ----------------------------------------------------------------------------------------------------------
#
# Shown where a save or load takes longer than two seconds, on the main process's stderr. A terminal shows one line that is rewritten.
# Elsewhere there is at most one line every ten seconds, and one at the end. A background save draws
# nothing; the log says when it is complete.


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
        total = self._total
        count = min(self._count, total or self._count)  # blocks may be read twice at edges
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
