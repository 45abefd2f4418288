"""A folder on this machine, or on a file system that its ranks share. No link is followed below the folder."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from ..errors import CheckpointError
from . import blocks
from .blocks import Part, Reader, Runs, Tick, Views, Writer, check_size, no_tick, rest
from .lock import NO_LOCKS, Heartbeat, KernelLock, lock_of, words
from .manifest import COMMIT
from .storage import PATH, Claim, Storage

HERE = -100  # AT_FDCWD
HELD = 256  # files that are kept open; a process may often have 1024
NOREPLACE, EXCHANGE = 1, 2
STALE = 3600.0  # seconds after which a half-written replacement has no owner
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe, opened so, does not wait


class LocalStorage(Storage):
    """`direct`: files of more than one block by O_DIRECT, or not; None for what the disk does quicker."""

    renames = True

    def __init__(self, place: str | os.PathLike[str], direct: bool | None = None) -> None:
        self.place = os.fspath(place)
        self._direct = direct
        self._held: dict[str, tuple[int, int]] | None = None  # within `held`: path → descriptor and size

    # -- contents

    def put(self, name: str, parts: Iterable[Part], size: int, tick: Tick = no_tick) -> tuple[int, ...]:
        return Writer(self.path(name), size, self._direct).write(parts, tick)

    def head(self, name: str, count: int) -> bytes:
        path = self.path(name)
        descriptor, found = _open(path)
        try:
            memory = bytearray(min(count, found))
            _fill(path, descriptor, [memoryview(memory)], 0)
        finally:
            blocks.do("close", path, os.close, descriptor)
        return bytes(memory)

    def size(self, name: str) -> int | None:
        path, link = self._find(name)
        try:
            found = blocks.do("stat", path, os.lstat, path)
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
                blocks.do("close", path, os.close, descriptor)

    def _read(
        self,
        name: str,
        size: int,
        checksums: Sequence[int] | None,
        tasks: Iterable[tuple[int, Runs]],
        tick: Tick,
    ) -> None:
        path = self.path(name)
        held = {} if self._held is None else self._held
        try:
            descriptor, found = held.get(path) or _open(path)
        except (FileNotFoundError, NotADirectoryError):
            check_size(path, None, size, checksums)
            return
        if self._held is not None and len(held) < HELD:
            held[path] = descriptor, found
        try:
            check_size(path, found, size, checksums)
            Reader(path, size, checksums, lambda views, at: _fill(path, descriptor, views, at)).run(
                tasks, tick
            )
        finally:
            if path not in held:
                blocks.do("close", path, os.close, descriptor)

    # -- names

    def path(self, name: str) -> str:
        """Raises CheckpointError for a name that leads out of the folder, or a link on the way."""
        path, link = self._find(name)
        if link:
            raise CheckpointError(f"{link}: a link, and links are not followed: put the folder itself there")
        return path

    def _find(self, name: str) -> tuple[str, str]:
        """Where `name` is, and the link on the way, or ""."""
        path, link = self.place, ""
        if not PATH.fullmatch(name):
            raise CheckpointError(
                f"{name!r} is no name of a file below {self.place}: use words with / between them"
            )
        for word in name.split("/") if name else ():
            link = link or (path if path != self.place and os.path.islink(path) else "")
            path = os.path.join(path, word)
        return path, link

    def list(self, folder: str = "") -> list[str]:
        path, link = self._find(folder)
        if link or (folder and os.path.islink(path)):
            return []
        try:
            return sorted(blocks.do("list", path, os.listdir, path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def modified(self, name: str) -> float:
        path = self.path(name)
        return blocks.do("stat", path, os.lstat, path).st_mtime

    def make(self, folder: str) -> None:
        path = self.path(folder)
        _make_above(path)
        blocks.do("mkdir", path, os.mkdir, path)

    def claim(self, checkpoint: str, folder: str = "") -> Claim:
        path, place, said = self.path(lock_of(checkpoint)), self.path(checkpoint), words(folder)
        _make_above(path)
        try:
            return KernelLock(path, place, said)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        return Heartbeat(self, lock_of(checkpoint), place, said)

    def sync(self, folder: str = "") -> None:
        _sync(self.path(folder))

    def rename(self, old: str, new: str) -> None:
        paths = self.path(old), self.path(new)
        blocks.do("rename", paths[0], _rename, *paths)

    def move(self, old: str, new: str) -> None:
        self.rename(old, new)
        self.sync()

    def supplant(self, old: str, new: str) -> None:
        paths = self.path(old), self.path(new)
        blocks.do("replace", paths[0], os.replace, *paths)

    def exchange(self, one: str, other: str) -> bool:
        paths = self.path(one), self.path(other)
        return blocks.do("exchange", paths[0], _renameat2, *paths, EXCHANGE)

    def replace(self, name: str, content: bytes) -> None:
        folder, slash, last = name.rpartition("/")
        above = folder + slash
        for left in self.list(folder):
            old = left.startswith(f".new-{last}-") and time.time() - self.modified(above + left) > STALE
            if old:
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
        if folder.strip("/") == "":
            raise CheckpointError(f"{path}: the folder of all checkpoints is not removed")
        try:
            if stat.S_ISDIR(blocks.do("stat", path, os.lstat, path).st_mode):
                commit = f"{path}/{COMMIT}"
                try:
                    blocks.do("unlink", commit, os.unlink, commit)
                    _sync(path)  # or a power failure could keep COMMIT, and lose the files
                except FileNotFoundError:
                    pass
            _remove(path)
        except FileNotFoundError:
            pass


def _open(path: str) -> tuple[int, int]:
    """A descriptor and the size of a regular file."""
    try:
        descriptor = blocks.do("open", path, os.open, path, FILE)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise CheckpointError(
            f"{path}: a link, and links are not followed: put the file itself there"
        ) from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        blocks.do("close", path, os.close, descriptor)
        raise CheckpointError(f"{path}: no regular file: put the file itself there")
    return descriptor, found.st_size


def _fill(path: str, descriptor: int, views: Views, at: int) -> None:
    while views := rest(views, 0):
        count = blocks.do("read", path, os.preadv, descriptor, views, at)
        if not count:
            raise CheckpointError(
                f"{path}: ends at byte {at} while it is read: another process changes it; load another checkpoint"
            )
        at += count
        views = rest(views, count)


def _make_above(path: str) -> None:
    """The folders that `path` needs above it, durably."""
    missing = []
    above = os.path.dirname(path)
    while above and not os.path.isdir(above):
        missing.append(above)
        above = os.path.dirname(above)
    for above in reversed(missing):
        try:
            blocks.do("mkdir", above, os.mkdir, above)
        except FileExistsError:
            pass  # another rank was quicker
        _sync(os.path.dirname(above) or ".")


def _sync(path: str) -> None:
    descriptor = blocks.do("open", path, os.open, path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        blocks.do("fsync directory", path, os.fsync, descriptor)
    finally:
        blocks.do("close", path, os.close, descriptor)


def _remove(path: str) -> None:
    """A file, a link itself, or a folder with its content."""
    try:
        if not stat.S_ISDIR(blocks.do("stat", path, os.lstat, path).st_mode):
            blocks.do("unlink", path, os.unlink, path)
            return
        for name in sorted(blocks.do("list", path, os.listdir, path)):
            _remove(f"{path}/{name}")
        blocks.do("rmdir", path, os.rmdir, path)
    except FileNotFoundError:
        pass  # another rank was quicker


def _renameat2(one: str, other: str, flag: int) -> bool:
    """False where the system or the file system has no such call, or not this kind of it."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(HERE, os.fsencode(one), HERE, os.fsencode(other), flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), one, None, other)


def _rename(old: str, new: str) -> None:
    if not _renameat2(old, new, NOREPLACE):
        if os.path.lexists(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
        os.rename(old, new)
