"""A folder on this machine, or on a file system that its ranks share. No link is followed below the folder.

Files are written by a few threads, a block at a time, and hashed piece by piece while in the cache: through the page cache, or past it
(O_DIRECT, from aligned memory; the unaligned tail goes through the cache). Both are durable when `put` returns. Which is quicker depends
on disk and kernel: the first file of at least `TRIAL` bytes on a device tries both on its own first blocks, twice in turn. The better one
writes the rest, and the later files of this process (past the cache, unless the other is quicker by a fifth). Until then files go through
the cache, and those of one block always.

Reading: a block is read by `preadv` in pieces. Wanted bytes go straight to their place, the rest to scratch memory, and the piece is hashed
while it is in the cache.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from queue import SimpleQueue
from time import perf_counter
from typing import Any, TypeVar

from ..errors import CheckpointError
from . import storage
from .codec import PAGE
from .manifest import BLOCK, COMMIT
from .storage import Part, Runs, SourceFile, Storage, Tick, Views

T = TypeVar("T")
BOUNCE = 2**23  # bytes of aligned memory of a thread that writes past the page cache
MOST = 512  # buffers of one call; Linux takes 1024
FEW = 32  # runs of a piece that are read in place; below this a run is longer than 32 KiB
ROUND = 2  # blocks of one round of the trial
TRIAL = 8 * ROUND * BLOCK
CLEARLY = 0.8  # past the page cache is taken unless this is not enough: it leaves the cache to others
DIRECT = getattr(os, "O_DIRECT", 0)
HELD = 256  # files that are kept open; a process may often have 1024
STALE = 3600.0  # seconds after which a half-written replacement has no owner
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe, opened so, does not wait
HERE, EXCHANGE = -100, 2  # AT_FDCWD and a flag of renameat2

past_is_quicker: dict[int, bool] = {}
"""Result of the trial by device (`st_dev`)."""


def do(operation: str, path: str, call: Callable[..., T], *arguments: Any) -> T:
    """Run ``call(*arguments)``, an `operation` on `path`; an OSError names both.

    Every call to the operating system and to fsspec goes through here. Tests replace it to kill, to fail, to shorten and to record.
    """
    try:
        return call(*arguments)
    except OSError as error:
        # Without a number, a name would replace its words.
        if error.filename is None and error.errno is not None:
            error.filename = path
        raise


class LocalStorage(Storage):
    """See `Storage`."""

    renames = True

    def __init__(self, place: str | os.PathLike[str]) -> None:
        self.place = os.fspath(place)
        self._held: dict[str, tuple[int, int]] | None = None  # within `held`: path → descriptor and size

    # -- contents

    def put(
        self, name: str, parts: Iterable[Part], size: int, tick: Tick = storage.no_tick
    ) -> tuple[int, ...]:
        return Writer(self.path(name), size).write(parts, tick)

    def head(self, name: str, count: int) -> bytes:
        path = self.path(name)
        descriptor, found = _open(path)
        try:
            memory = bytearray(min(count, found))
            _fill(path, descriptor, [memoryview(memory)], 0)
        finally:
            do("close", path, os.close, descriptor)
        return bytes(memory)

    def size(self, name: str) -> int | None:
        path, link = self._find(name)
        try:
            found = do("stat", path, os.lstat, path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) and not link else None

    @contextmanager
    def held(self) -> Iterator[bool]:
        held = self._held = {}
        try:
            yield True  # the page cache has what was just read
        finally:
            self._held = None
            for path, (descriptor, _) in held.items():
                do("close", path, os.close, descriptor)

    def read(self, file: SourceFile, tasks: Iterable[tuple[int, Runs]], tick: Tick) -> None:
        path = self.path(file.name)
        held = {} if self._held is None else self._held
        try:
            descriptor, found = held.get(path) or _open(path)
        except (FileNotFoundError, NotADirectoryError):
            file.check_size(None)
            return
        if self._held is not None and len(held) < HELD:
            held[path] = descriptor, found
        try:
            file.check_size(found)
            for count in storage.spread(Reader(file, path, descriptor).block, tasks, "read"):
                tick(count)
        finally:
            if path not in held:
                do("close", path, os.close, descriptor)

    # -- names

    def path(self, name: str) -> str:
        """Raises CheckpointError for a name that leads out of the folder, or a link on the way."""
        path, link = self._find(name)
        if link:
            raise CheckpointError(f"{link}: a link, and links are not followed: put the folder itself there")
        return path

    def _find(self, name: str) -> tuple[str, str]:
        """The path of `name`, and a link on the way, or ""."""
        path, link = self.place, ""
        if not storage.PATH.fullmatch(name):
            raise self.refusal(name)
        for word in name.split("/") if name else ():
            link = link or (path if path != self.place and os.path.islink(path) else "")
            path = os.path.join(path, word)
        return path, link

    def list(self, folder: str = "") -> list[str]:
        path, link = self._find(folder)
        if link or (folder and os.path.islink(path)):
            return []
        try:
            return sorted(do("list", path, os.listdir, path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def modified(self, name: str) -> float:
        path = self.path(name)
        return do("stat", path, os.lstat, path).st_mtime

    def make(self, folder: str) -> None:
        path = self.path(folder)
        make_above(path)
        do("mkdir", path, os.mkdir, path)

    def sync(self, folder: str = "") -> None:
        _sync(self.path(folder))

    def rename(self, old: str, new: str) -> None:
        paths = self.path(old), self.path(new)
        do("rename", paths[0], _rename, *paths)

    def move(self, old: str, new: str) -> None:
        self.rename(old, new)
        self.sync()

    def supplant(self, old: str, new: str) -> None:
        paths = self.path(old), self.path(new)
        do("replace", paths[0], os.replace, *paths)

    def exchange(self, one: str, other: str) -> bool:
        paths = self.path(one), self.path(other)
        return do("exchange", paths[0], _exchange, *paths)

    def replace(self, name: str, content: bytes) -> None:
        folder, slash, last = name.rpartition("/")
        above = folder + slash
        for left in self.list(folder):
            if left.startswith(f".new-{last}-") and time.time() - self.modified(above + left) > STALE:
                self.remove(above + left)
        fresh = f"{above}.new-{last}-{secrets.token_hex(4)}"
        try:
            self.put(fresh, [content], len(content))
            self.supplant(fresh, name)
        except OSError:
            self.remove(fresh)
            raise
        self.sync(folder)

    def remove(self, folder: str) -> None:
        path = self.path(folder)
        if not folder:
            raise CheckpointError(f"{path}: the folder of all checkpoints is not removed")
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(do("stat", path, os.lstat, path).st_mode):
                commit = f"{path}/{COMMIT}"
                with suppress(FileNotFoundError):
                    do("unlink", commit, os.unlink, commit)
                    _sync(path)  # or a power failure could keep COMMIT, and lose the files
            _remove(path)


# -- writing -----------------------------------------------------------------------------------------------------------

Task = tuple[int, Views]  # a block's number and its buffers
Done = tuple[int, int, int]  # a block's number, CRC-32 and bytes


class Writer:
    """A new file of `size` bytes at `path`; `write` does all of it. If it fails, the bytes written so far stay."""

    def __init__(self, path: str, size: int) -> None:
        self._path, self._size = path, size
        self._through_cache = self._past_cache = -1  # descriptors
        self._spare: SimpleQueue[memoryview] = SimpleQueue()
        self._checksums = [0] * -(-size // BLOCK)
        self._crc32 = storage.crc32()

    def write(self, parts: Iterable[Part], tick: Tick) -> tuple[int, ...]:
        """Write `parts` durably, and return the CRC-32 of each block."""
        with ExitStack() as self._open:
            self._through_cache = self._descriptor("create", os.O_CREAT | os.O_EXCL, 0o666)
            if self._size <= BLOCK:
                pieces = storage.exactly(storage.cut(parts, storage.PIECE), self._size, self._path)
                if group := [view for some in pieces for view in some]:
                    self._note([self._through((0, group))], tick)
            else:
                tasks = enumerate(storage.exactly(storage.cut(parts, BLOCK), self._size, self._path))
                do("allocate", self._path, _allocate, self._through_cache, self._size)
                self._note(storage.spread(self._choose(tasks, tick), tasks, "write"), tick)
            do("fsync", self._path, os.fsync, self._through_cache)
        return tuple(self._checksums)

    def _descriptor(self, operation: str, flags: int, *mode: int) -> int:
        descriptor = do(operation, self._path, os.open, self._path, os.O_WRONLY | os.O_CLOEXEC | flags, *mode)
        self._open.callback(do, "close", self._path, os.close, descriptor)
        return descriptor

    def _note(self, done: Iterable[Done], tick: Tick) -> None:
        for number, checksum, count in done:
            self._checksums[number] = checksum
            tick(count)

    def _choose(self, tasks: Iterator[Task], tick: Tick) -> Callable[[Task], Done]:
        """Choose between page cache and O_DIRECT; a trial writes the first blocks."""
        device = os.fstat(self._through_cache).st_dev
        past = past_is_quicker.get(device)
        if (
            not DIRECT
            or past is False
            or (past is None and self._size < TRIAL)
            or not self._open_direct(device)
        ):
            return self._through
        if past is None:
            seconds = {self._past: float("inf"), self._through: float("inf")}
            for way in (self._past, self._through) * 2:
                start = perf_counter()
                self._note(storage.spread(way, islice(tasks, ROUND), "write"), tick)
                do("fsync", self._path, os.fsync, self._through_cache)
                seconds[way] = min(seconds[way], perf_counter() - start)
            quicker = CLEARLY * seconds[self._past] < seconds[self._through]
            past = past_is_quicker[device] = past_is_quicker.get(device, True) and quicker
        return self._past if past else self._through

    def _open_direct(self, device: int) -> bool:
        try:
            self._past_cache = self._descriptor("open", os.O_NOFOLLOW | DIRECT)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            past_is_quicker[device] = False
            return False
        memory = memoryview(storage.Pages(storage.WORKERS * BOUNCE))
        for at in range(0, len(memory), BOUNCE):
            self._spare.put(memory[at : at + BOUNCE])
        return True

    def _through(self, task: Task) -> Done:
        number, group = task
        at, crc = number * BLOCK, 0
        small = sum(map(len, group)) <= storage.PIECE and len(group) <= MOST
        for piece in [group] if small else storage.cut(group, storage.PIECE, MOST):
            for view in piece:
                crc = self._crc32(view, crc)
            at = self._put(piece, at)
        return number, crc, at - number * BLOCK

    def _past(self, task: Task) -> Done:
        number, group = task
        at, crc = number * BLOCK, 0
        bounce = self._spare.get()
        try:
            for chunk in storage.cut(group, BOUNCE):
                plain = len(chunk) == 1 and not storage.address(chunk[0]) % PAGE
                source = chunk[0] if plain else bounce[: sum(map(len, chunk))]
                end = 0
                for (piece,) in storage.cut(chunk, storage.PIECE, 1):
                    begin, end = end, end + len(piece)
                    if not plain:
                        storage.copy(source[begin:end], piece)
                    crc = self._crc32(source[begin:end], crc)
                at = self._put_direct(source, at)
        finally:
            self._spare.put(bounce)
        return number, crc, at - number * BLOCK

    def _put_direct(self, source: memoryview, at: int) -> int:
        done, end = 0, len(source) - len(source) % PAGE
        while done < end:
            try:
                count = do("write", self._path, os.pwritev, self._past_cache, [source[done:end]], at + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # It asks for more than our alignment.
                past_is_quicker[os.fstat(self._past_cache).st_dev] = False
                break
            done += count - count % PAGE
            if count < PAGE:
                break
        return self._put([source[done:]], at + done)

    def _put(self, group: Views, at: int) -> int:
        while group := rest(group, 0):
            count = do("write", self._path, os.pwritev, self._through_cache, group, at)
            if not count:
                raise OSError(errno.EIO, "the system wrote nothing, and did not say why", self._path)
            at += count
            group = rest(group, count)
        return at


def rest(group: Views, count: int) -> Views:
    """Drop the first `count` bytes of `group`, and empty views."""
    left = []
    for view in group:
        if count < len(view):
            left.append(view[count:])
        count = max(count - len(view), 0)
    return left


def _allocate(descriptor: int, size: int) -> None:
    """Reserve disk space (ENOSPC now, not later) if the file system can; `posix_fallocate` would write every block instead."""
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    while fallocate is not None and fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV):
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


# -- reading -----------------------------------------------------------------------------------------------------------


class Reader:
    """An open file; a few threads read its blocks."""

    def __init__(self, file: SourceFile, path: str, descriptor: int) -> None:
        self._file, self._path, self._descriptor = file, path, descriptor
        self._crc32 = storage.crc32()
        self._spare: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(storage.WORKERS):
            self._spare.put(memoryview(bytearray(storage.PIECE)))

    def block(self, task: tuple[int, Runs]) -> int:
        """Read block ``task[0]`` and fill its runs ``task[1]``; verified where checksums are known. Returns its bytes."""
        number, runs = task
        begin, end, crc = number * BLOCK, min((number + 1) * BLOCK, self._file.size), 0
        for at, stop, targets in _pieces(runs, begin, end):
            if self._file.checksums is not None:
                crc = self._piece(at, stop, targets, crc)
            elif targets:
                last, view = targets[-1]
                self._piece(targets[0][0], last + len(view), targets)
        if self._file.checksums is None:
            return sum(len(view) for _, view in runs)
        self._file.check(number, crc)
        return end - begin

    def _piece(self, begin: int, end: int, targets: Runs, crc: int | None = None) -> int:
        """Read ``[begin, end)``; the CRC-32 with it, if one is given."""
        scratch = self._spare.get()
        few = len(targets) <= FEW
        views, at = [], begin
        for place, view in targets if few else ():  # in their place, and scratch memory between them
            views += [scratch[at - begin : place - begin], view]
            at = place + len(view)
        views.append(scratch[at - begin : end - begin])
        try:
            _fill(self._path, self._descriptor, views, begin)
            if crc is not None:
                for view in views:
                    crc = self._crc32(view, crc)
            for place, view in () if few else targets:
                view[:] = scratch[place - begin : place - begin + len(view)]
        finally:
            self._spare.put(scratch)
        return crc or 0


def _pieces(runs: Runs, begin: int, end: int) -> Iterator[tuple[int, int, Runs]]:
    """Divide ``[begin, end)`` into pieces, each with the parts of `runs` in it."""
    first = 0
    for at in range(begin, end, storage.PIECE):
        stop = min(at + storage.PIECE, end)
        targets = []
        while first < len(runs) and runs[first][0] < stop:
            place, view = runs[first]
            targets.append((max(place, at), view[max(at - place, 0) : stop - place]))
            if place + len(view) > stop:
                break
            first += 1
        yield at, stop, targets


def _open(path: str) -> tuple[int, int]:
    """Open a regular file; return its descriptor and size."""
    try:
        descriptor = do("open", path, os.open, path, FILE)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise CheckpointError(f"{path}: a link, which is not followed: put the file itself there") from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        do("close", path, os.close, descriptor)
        raise CheckpointError(f"{path}: not a regular file: put the file itself there")
    return descriptor, found.st_size


def _fill(path: str, descriptor: int, views: Views, at: int) -> None:
    while views := rest(views, 0):
        count = do("read", path, os.preadv, descriptor, views, at)
        if not count:
            raise CheckpointError(f"{path}: ends at byte {at} while it is read: another process changes it")
        at += count
        views = rest(views, count)


# -- names -------------------------------------------------------------------------------------------------------------


def make_above(path: str) -> None:
    """Make the missing folders above `path`, durably."""
    above = os.path.dirname(path)
    if not above or os.path.isdir(above):
        return
    make_above(above)
    with suppress(FileExistsError):  # another rank was quicker
        do("mkdir", above, os.mkdir, above)
    _sync(os.path.dirname(above) or ".")


def _sync(path: str) -> None:
    descriptor = do("open", path, os.open, path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        do("fsync directory", path, os.fsync, descriptor)
    finally:
        do("close", path, os.close, descriptor)


def _remove(path: str) -> None:
    """A file, a link itself, or a folder with its content."""
    with suppress(FileNotFoundError):  # another rank was quicker
        if not stat.S_ISDIR(do("stat", path, os.lstat, path).st_mode):
            do("unlink", path, os.unlink, path)
            return
        for name in sorted(do("list", path, os.listdir, path)):
            _remove(f"{path}/{name}")
        do("rmdir", path, os.rmdir, path)


def _exchange(one: str, other: str) -> bool:
    """Swap two names atomically; False if the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(HERE, os.fsencode(one), HERE, os.fsencode(other), EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), one, None, other)


def _rename(old: str, new: str) -> None:
    if os.path.lexists(new):  # the caller holds the writer lock, so that nothing comes in between
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
    os.rename(old, new)
