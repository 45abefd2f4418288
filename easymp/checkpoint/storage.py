"""Folders of checkpoints, and the one on this machine or on a shared file system; `storage_remote`: behind a URL.

A few threads write and read a local file block by block, and hash it piece by piece while it is in the processor's
cache. Files of more than one block bypass the page cache (O_DIRECT; the unaligned tail goes through it), which leaves
it to the training data. No link is followed below the folder.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import re
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol, TypeVar

from torch import Tensor

from ..errors import CheckpointError
from .buffers import Pages, address, as_bytes, copy, on_host
from .codec import PAGE
from .manifest import BLOCK, COMMIT
from .progress import Tick, ignore

PATH = re.compile(r"(?:(?!\.{1,2}(?:/|\Z))[^/\0]+(?:/(?=[^/])|\Z))*", re.DOTALL)
"""Names below a folder. They may come from a manifest, so none leads out of it."""
WORKERS = 3  # threads: one more than hash at the same time on 2 cores, so that the disk always has work
PIECE = 2**20  # bytes that are hashed at once; a core's own cache holds them
BOUNCE = 2**23  # bytes of aligned memory of a thread that bypasses the page cache
MOST_BUFFERS = 512  # of one call; Linux takes 1024
MOST_TARGETS = 32  # of a piece that are read in place; more are copied from the piece
MOST_OPEN = 256  # files that are kept open; a process may often have 1024
DIRECT = getattr(os, "O_DIRECT", 0)
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe, opened so, does not wait

T = TypeVar("T")
R = TypeVar("R")
Bytes = bytes | memoryview
Views = list[memoryview]
Targets = list[tuple[int, memoryview]]  # (offset in the file, memory to fill), sorted


class MemoryFile:
    """A whole tensor in host memory, read as a file of its bytes."""

    def __init__(self, tensor: Tensor, name: str) -> None:
        self._content = as_bytes(on_host(tensor, name))

    def fetch(self, targets: Targets, tick: Tick = ignore) -> None:
        for offset, view in targets:
            copy(view, self._content[offset : offset + len(view)])
            tick(len(view))

    def verify(self, tick: Tick = ignore, blocks: Iterable[int] | None = None) -> None:
        pass


class Storage(Protocol):
    """A folder at `root`. `renames`: whether a folder in it can be renamed atomically. OSErrors pass through."""

    root: str
    renames: bool

    def put(self, name: str, parts: Iterable[Bytes], size: int, tick: Tick = ignore) -> tuple[int, ...]: ...
    def replace(self, name: str, parts: Iterable[Bytes], size: int, tick: Tick = ignore) -> None: ...
    def head(self, name: str, count: int) -> bytes: ...
    def size(self, name: str) -> int | None: ...
    def files_kept_open(self) -> AbstractContextManager[bool]: ...
    def read(self, file: SourceFile, blocks: Iterable[tuple[int, Targets]], tick: Tick) -> None: ...
    def list(self, folder: str = "") -> list[str]: ...

    def make(self, folder: str) -> None: ...
    def sync(self, folder: str = "") -> None: ...
    def rename(self, old: str, new: str) -> None: ...
    def move(self, old: str, new: str) -> None: ...
    def remove(self, name: str) -> None: ...


@dataclass(frozen=True)
class SourceFile:
    """A file to read; `checksums` has one value for each BLOCK, or is None for a file of another program."""

    storage: Storage
    name: str
    size: int
    checksums: Sequence[int] | None = None

    def __str__(self) -> str:
        return f"{self.storage.root.rstrip('/')}/{self.name}"

    def fetch(self, targets: Targets, tick: Tick = ignore) -> None:
        """Fill the `targets` (offset in the file, memory; sorted), and verify every BLOCK that is touched."""
        targets = [target for target in targets if target[1].nbytes]
        ranges = split_targets(targets, 0, targets[-1][0] + targets[-1][1].nbytes if targets else 0, BLOCK)
        self.storage.read(self, ((begin // BLOCK, in_block) for begin, _, in_block in ranges if in_block), tick)

    def verify(self, tick: Tick = ignore, blocks: Iterable[int] | None = None) -> None:
        """Read and check these blocks, or all; raises as `fetch`."""
        blocks = range(block_count(self.size)) if blocks is None else blocks
        self.storage.read(self, ((block, []) for block in blocks), tick)

    def check_size(self, size: int | None) -> None:
        if size != self.size:
            fault = f"{size} bytes, and {self.size} were written"
            if size is None:
                fault = "no such file: the checkpoint is incomplete"
            raise CheckpointError(f"{self}: {fault}: load another checkpoint, or copy this file again")

    def check_block(self, block: int, crc: int) -> None:
        if self.checksums is not None and crc != self.checksums[block]:
            raise CheckpointError(
                f"{self}: block {block} (from byte {block * BLOCK}) is not what was written: its CRC-32 is "
                f"{crc:#010x}, not {self.checksums[block]:#010x}. The file is damaged: load another checkpoint, or "
                "copy this file again"
            )


Files = Mapping[str, SourceFile | MemoryFile]


def run_in_threads(function: Callable[[T], R], tasks: Iterable[T], name: str) -> Iterator[R]:
    """Run ``function(task)`` on WORKERS threads. Yield results as they complete; raise the first error."""
    queue: SimpleQueue[tuple[T] | None] = SimpleQueue()
    results: SimpleQueue[R | BaseException] = SimpleQueue()

    def work() -> None:
        while (task := queue.get()) is not None:
            try:
                results.put(function(*task))
            except BaseException as error:
                results.put(error)

    def next_result() -> R:
        result = results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    threads: list[Thread] = []  # `concurrent.futures` takes no work while the interpreter shuts down
    running = 0
    try:
        for task in tasks:
            if len(threads) < WORKERS:
                thread = Thread(target=work, name=f"easymp-{name}", daemon=True)
                try:
                    thread.start()
                    threads.append(thread)
                except RuntimeError:  # no more threads are allowed, or the interpreter ends
                    if not threads:
                        yield function(task)
                        continue
            queue.put((task,))
            running += 1
            if running > WORKERS:
                yield next_result()
                running -= 1
        for _ in range(running):
            yield next_result()
    finally:
        for _ in threads:
            queue.put(None)
        for thread in threads:
            thread.join()


@cache
def crc32() -> Callable[[bytes | bytearray | memoryview, int], int]:
    """``crc32(buffer, previous value)`` from the fastest installed package. All give one value and release the GIL."""
    for module in ("isal.isal_zlib", "zlib_ng.zlib_ng"):
        with suppress(ImportError):
            function: Callable[[bytes | bytearray | memoryview, int], int] = importlib.import_module(module).crc32
            return function
    return zlib.crc32


def block_count(size: int) -> int:
    return -(-size // BLOCK)


def split_targets(targets: Targets, begin: int, end: int, step: int) -> Iterator[tuple[int, int, Targets]]:
    """Divide ``[begin, end)`` into ranges of `step` bytes, each with the parts of `targets` in it."""
    index = 0
    for start in range(begin, end, step):
        stop = min(start + step, end)
        in_range = []
        while index < len(targets) and targets[index][0] < stop:
            offset, view = targets[index]
            in_range.append((max(offset, start), view[max(start - offset, 0) : stop - offset]))
            if offset + len(view) > stop:
                break
            index += 1
        yield start, stop, in_range


def regroup(parts: Iterable[Bytes], step: int, max_buffers: int = sys.maxsize) -> Iterator[Views]:
    """Yield the bytes of `parts` in groups of `step` bytes or `max_buffers` buffers, the smaller of the two."""
    group: Views = []
    room = step
    for part in parts:
        view = memoryview(part)
        if not view.nbytes:
            continue  # it can't be cast if it has more than one dimension
        view = view.cast("B")
        offset = 0
        while offset < len(view):
            group.append(view[offset : offset + room])
            offset += len(group[-1])
            room -= len(group[-1])
            if not room or len(group) == max_buffers:
                yield group
                group, room = [], step
    if group:
        yield group


def regroup_exactly(parts: Iterable[Bytes], step: int, size: int, file: str) -> Iterator[Views]:
    """As `regroup`; CheckpointError if `parts` have not `size` bytes, before any surplus byte is yielded."""
    missing = size
    for group in regroup(parts, step):
        missing -= sum(map(len, group))
        if missing < 0:
            break
        yield group
    if missing:
        raise CheckpointError(f"{file}: the parts are not the {size} bytes that were announced")


def drop_bytes(views: Views, count: int) -> Views:
    """Drop the first `count` bytes of `views`, and empty views."""
    remaining = []
    for view in views:
        if count < len(view):
            remaining.append(view[count:])
        count = max(count - len(view), 0)
    return remaining


def do(operation: str, path: str, call: Callable[..., T], *arguments: Any) -> T:
    """Run ``call(*arguments)``; an OSError names `path`. All system calls go through here, and tests replace it."""
    try:
        return call(*arguments)
    except OSError as error:
        # Without a number, a name would replace its words.
        if error.filename is None and error.errno is not None:
            error.filename = path
        raise


def check_name(root: str, name: str) -> None:
    if not PATH.fullmatch(name):
        raise CheckpointError(f"{name!r} is not a file's name below {root}: use words with / between")


class LocalStorage:
    """The local folder at `root`."""

    renames = True

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.fspath(root)
        self._open_files: dict[str, tuple[int, int]] | None = None  # path → descriptor and size

    def put(self, name: str, parts: Iterable[Bytes], size: int, tick: Tick = ignore) -> tuple[int, ...]:
        """Write a new file of `size` bytes, durably; returns the CRC-32 of each BLOCK. An existing file is an error."""
        return Writer(self.local_path(name), size).write(parts, tick)

    def replace(self, name: str, parts: Iterable[Bytes], size: int, tick: Tick = ignore) -> None:
        """Write a file durably, and put it in the place of an existing one when it is complete."""
        folder, slash, last = name.rpartition("/")
        temporary = f"{folder}{slash}.new-{last}"
        self.remove(temporary)  # of a process that was killed
        try:
            self.put(temporary, parts, size, tick)
            do("replace", self.local_path(temporary), os.replace, self.local_path(temporary), self.local_path(name))
        except BaseException:
            self.remove(temporary)
            raise
        self.sync(folder)

    def head(self, name: str, count: int) -> bytes:
        """The first `count` bytes of a file, or all where it has fewer."""
        path = self.local_path(name)
        descriptor, size = _open(path)
        try:
            memory = bytearray(min(count, size))
            _transfer("read", os.preadv, path, descriptor, [memoryview(memory)], 0)
        finally:
            do("close", path, os.close, descriptor)
        return bytes(memory)

    def size(self, name: str) -> int | None:
        """Bytes of a regular file; None where there is none."""
        path, link = self._resolve(name)
        try:
            status = do("stat", path, os.lstat, path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) and not link else None

    @contextmanager
    def files_kept_open(self) -> Iterator[bool]:
        """A context in which files stay open; its value says whether a second read is cheap."""
        open_files = self._open_files = {}
        try:
            yield True  # the page cache has what was just read
        finally:
            self._open_files = None
            for path, (descriptor, _) in open_files.items():
                do("close", path, os.close, descriptor)

    def read(self, file: SourceFile, blocks: Iterable[tuple[int, Targets]], tick: Tick) -> None:
        """Read and check blocks of a file, for `SourceFile`: their numbers, and the targets to fill in each."""
        path = self.local_path(file.name)
        open_files = {} if self._open_files is None else self._open_files
        try:
            descriptor, size = open_files.get(path) or _open(path)
        except (FileNotFoundError, NotADirectoryError):
            file.check_size(None)
            return
        if self._open_files is not None and len(open_files) < MOST_OPEN:
            open_files[path] = descriptor, size
        try:
            file.check_size(size)
            for count in run_in_threads(Reader(file, path, descriptor).read_block, blocks, "read"):
                tick(count)
        finally:
            if path not in open_files:
                do("close", path, os.close, descriptor)

    def local_path(self, name: str) -> str:
        """The path of a file or folder; CheckpointError for one outside of the folder, or behind a link."""
        path, link = self._resolve(name)
        if link:
            raise CheckpointError(f"{link}: a link, and links are not followed: put the folder itself there")
        return path

    def _resolve(self, name: str) -> tuple[str, str]:
        """The path of `name`, and the first link on the way to it ("" if there is none)."""
        path, link = self.root, ""
        check_name(self.root, name)
        for part in name.split("/") if name else ():
            link = link or (path if path != self.root and os.path.islink(path) else "")
            path = os.path.join(path, part)
        return path, link

    def list(self, folder: str = "") -> list[str]:
        """Sorted names of files and folders right in `folder`; none where there is no such folder."""
        path, link = self._resolve(folder)
        if link or (folder and os.path.islink(path)):
            return []
        try:
            return sorted(do("list", path, os.listdir, path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def make(self, folder: str) -> None:
        """Make a folder and its parents; raise FileExistsError if it exists."""
        path = self.local_path(folder)
        make_parents(path)
        do("mkdir", path, os.mkdir, path)

    def sync(self, folder: str = "") -> None:
        """Make changes of the names in `folder` durable."""
        _sync(self.local_path(folder))

    def rename(self, old: str, new: str) -> None:
        """Rename a folder atomically, only where `renames`; `new` does not exist."""
        source, target = self.local_path(old), self.local_path(new)
        if os.path.lexists(target):  # the caller holds the writer lock, so that nothing comes in between
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        do("rename", source, os.rename, source, target)

    def move(self, old: str, new: str) -> None:
        """Rename a checkpoint's folder, else copy it and remove the old one. A kill leaves at least one with COMMIT."""
        self.rename(old, new)
        self.sync()

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its content, COMMIT first. A missing one is ignored."""
        path = self.local_path(name)
        if not name:
            raise CheckpointError(f"{path}: the folder of all checkpoints is not removed")
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(do("stat", path, os.lstat, path).st_mode):
                commit = f"{path}/{COMMIT}"
                with suppress(FileNotFoundError):
                    do("unlink", commit, os.unlink, commit)
                    _sync(path)  # or a power failure could keep COMMIT, and lose the files
            _remove(path)


def read_small(storage: Storage, name: str, limit: int) -> bytes:
    """A whole small file; one of more than `limit` bytes is a CheckpointError."""
    content = storage.head(name, limit + 1)
    if len(content) > limit:
        raise CheckpointError(f"{storage.root}/{name}: more than {limit} bytes, which easymp never writes")
    return content


WrittenBlock = tuple[int, int, int]  # a block's number, CRC-32 and bytes


class Writer:
    """A new file of `size` bytes at `path`; `write` does all of it. If it fails, the bytes written so far stay."""

    def __init__(self, path: str, size: int) -> None:
        self._path, self._size = path, size
        self._cached = self._direct = -1  # descriptors: through the page cache, and past it
        self._bounce_buffers: SimpleQueue[memoryview] = SimpleQueue()
        self._crc32 = crc32()

    def write(self, parts: Iterable[Bytes], tick: Tick) -> tuple[int, ...]:
        """Write all `parts`, durably. Returns the CRC-32 of each block."""
        checksums = [0] * block_count(self._size)
        with ExitStack() as self._open_files:
            self._cached = self._open("create", os.O_CREAT | os.O_EXCL, 0o666)
            blocks = enumerate(regroup_exactly(parts, BLOCK, self._size, self._path))
            if self._size <= BLOCK:
                written_blocks: Iterable[WrittenBlock] = map(self._write_cached, blocks)
            else:
                do("allocate", self._path, _allocate, self._cached, self._size)
                write_block = self._write_direct if self._open_direct() else self._write_cached
                written_blocks = run_in_threads(write_block, blocks, "write")
            for block, crc, count in written_blocks:
                checksums[block] = crc
                tick(count)
            do("fsync", self._path, os.fsync, self._cached)
        return tuple(checksums)

    def _open(self, operation: str, flags: int, *mode: int) -> int:
        descriptor = do(operation, self._path, os.open, self._path, os.O_WRONLY | os.O_CLOEXEC | flags, *mode)
        self._open_files.callback(do, "close", self._path, os.close, descriptor)
        return descriptor

    def _open_direct(self) -> bool:
        """Open the file once more, past the page cache; False where the file system has no such way."""
        if not DIRECT:
            return False
        try:
            self._direct = self._open("open", os.O_NOFOLLOW | DIRECT)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return False
        memory = memoryview(Pages(WORKERS * BOUNCE))
        for start in range(0, len(memory), BOUNCE):
            self._bounce_buffers.put(memory[start : start + BOUNCE])
        return True

    def _write_cached(self, task: tuple[int, Views]) -> WrittenBlock:
        block, views = task
        offset, crc = block * BLOCK, 0
        for views_of_piece in regroup(views, PIECE, MOST_BUFFERS):
            for view in views_of_piece:
                crc = self._crc32(view, crc)
            offset = _transfer("write", os.pwritev, self._path, self._cached, views_of_piece, offset)
        return block, crc, offset - block * BLOCK

    def _write_direct(self, task: tuple[int, Views]) -> WrittenBlock:
        block, views = task
        offset, crc = block * BLOCK, 0
        bounce = self._bounce_buffers.get()
        try:
            for chunk in regroup(views, BOUNCE):
                is_aligned = len(chunk) == 1 and not address(chunk[0]) % PAGE
                source = chunk[0] if is_aligned else bounce[: sum(map(len, chunk))]
                end = 0
                for (part,) in regroup(chunk, PIECE, 1):
                    begin, end = end, end + len(part)
                    if not is_aligned:
                        copy(source[begin:end], part)
                    crc = self._crc32(source[begin:end], crc)
                offset = self._put_direct(source, offset)
        finally:
            self._bounce_buffers.put(bounce)
        return block, crc, offset - block * BLOCK

    def _put_direct(self, source: memoryview, offset: int) -> int:
        descriptor = self._direct  # -1 as soon as any thread learns that the file system refuses
        done_bytes, end = 0, len(source) - len(source) % PAGE if descriptor >= 0 else 0
        while done_bytes < end:
            try:
                count = do("write", self._path, os.pwritev, descriptor, [source[done_bytes:end]], offset + done_bytes)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = -1  # the file system asks for more than our alignment
                break
            done_bytes += count - count % PAGE
            if count < PAGE:
                break
        remainder = [source[done_bytes:]]
        return _transfer("write", os.pwritev, self._path, self._cached, remainder, offset + done_bytes)


def _allocate(descriptor: int, size: int) -> None:
    """Reserve disk space (ENOSPC now, not later) if the file system can; `posix_fallocate` would write every block."""
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    while fallocate is not None and fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV):
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


class Reader:
    """An open file; a few threads read its blocks."""

    def __init__(self, file: SourceFile, path: str, descriptor: int) -> None:
        self._file, self._path, self._descriptor = file, path, descriptor
        self._crc32 = crc32()
        self._scratch_buffers: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(WORKERS):
            self._scratch_buffers.put(memoryview(bytearray(PIECE)))

    def read_block(self, task: tuple[int, Targets]) -> int:
        """Read and verify a block, and fill the targets in it. Returns the number of bytes."""
        block, targets = task
        begin, end, crc = block * BLOCK, min((block + 1) * BLOCK, self._file.size), 0
        for start, stop, in_piece in split_targets(targets, begin, end, PIECE):
            if self._file.checksums is not None:
                crc = self._read_piece(start, stop, in_piece, crc)
            elif in_piece:
                last_offset, last_view = in_piece[-1]
                self._read_piece(in_piece[0][0], last_offset + len(last_view), in_piece)
        if self._file.checksums is None:
            return sum(len(view) for _, view in targets)
        self._file.check_block(block, crc)
        return end - begin

    def _read_piece(self, begin: int, end: int, targets: Targets, crc: int = 0) -> int:
        """Read ``[begin, end)`` into the targets, and into scratch memory between them; returns the CRC-32 with it."""
        scratch = self._scratch_buffers.get()
        in_place = len(targets) <= MOST_TARGETS
        views, position = Views(), begin
        for offset, view in targets if in_place else ():
            views += [scratch[position - begin : offset - begin], view]
            position = offset + len(view)
        views.append(scratch[position - begin : end - begin])
        try:
            _transfer("read", os.preadv, self._path, self._descriptor, views, begin)
            if self._file.checksums is not None:
                for view in views:
                    crc = self._crc32(view, crc)
            for offset, view in () if in_place else targets:
                view[:] = scratch[offset - begin : offset - begin + len(view)]
        finally:
            self._scratch_buffers.put(scratch)
        return crc


def _open(path: str) -> tuple[int, int]:
    """The descriptor and size of a regular file."""
    try:
        descriptor = do("open", path, os.open, path, READ_FLAGS)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise CheckpointError(f"{path}: a link, which is not followed: put the file itself there") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        do("close", path, os.close, descriptor)
        raise CheckpointError(f"{path}: not a regular file: put the file itself there")
    return descriptor, status.st_size


def _transfer(operation: str, call: Callable[..., int], path: str, descriptor: int, views: Views, offset: int) -> int:
    """Read or write all `views` from byte `offset` of a file on. Returns the offset behind them."""
    views = drop_bytes(views, 0)
    while views:
        count = do(operation, path, call, descriptor, views, offset)
        if not count and operation == "read":
            raise CheckpointError(f"{path}: ends at byte {offset} while it is read: another process changes it")
        if not count:
            raise OSError(errno.EIO, "the system wrote nothing, and did not say why", path)
        offset += count
        views = drop_bytes(views, count)
    return offset


def make_parents(path: str) -> None:
    """Make the missing folders above `path`, durably."""
    parent = os.path.dirname(path)
    if not parent or os.path.isdir(parent):
        return
    make_parents(parent)
    with suppress(FileExistsError):  # another rank was quicker
        do("mkdir", parent, os.mkdir, parent)
    _sync(os.path.dirname(parent) or ".")


def _sync(path: str) -> None:
    descriptor = do("open", path, os.open, path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        do("fsync directory", path, os.fsync, descriptor)
    finally:
        do("close", path, os.close, descriptor)


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):  # another rank was quicker
        if not stat.S_ISDIR(do("stat", path, os.lstat, path).st_mode):
            do("unlink", path, os.unlink, path)
            return
        for name in sorted(do("list", path, os.listdir, path)):
            _remove(f"{path}/{name}")
        do("rmdir", path, os.rmdir, path)
