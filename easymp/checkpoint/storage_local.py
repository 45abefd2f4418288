"""A folder on this machine, or on a file system that its ranks share.

Every call to the system goes through `calls.do`, which says what they are; tests fail them, shorten them, or die between them.

No link is followed below the folder (above it the user's own are). File contents are `writing` and `reading`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from ..errors import CheckpointError
from . import blocks
from .blocks import Reader, Writer, check_size, rest
from .lock import NO_LOCKS, Lock, Marker, lock_of
from .manifest import COMMIT
from .storage import Claim, Part, Tick, components, nothing

HERE = -100  # AT_FDCWD
HELD = 256  # files that are kept open; a process may often have 1024
NOREPLACE, EXCHANGE = 1, 2
STALE = 3600.0  # seconds after which a half-written replacement belongs to no one
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = (
    os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
)  # a pipe, opened so, does not wait for its other end


class LocalStorage:
    """As `Storage` says. `direct`: files of more than one block by O_DIRECT, or not; None for what the disk does quicker."""

    renames = True

    def __init__(self, place: str | os.PathLike[str], direct: bool | None = None) -> None:
        self.place = os.fspath(place)
        self._direct = direct
        self._held: dict[str, tuple[int, int]] | None = None  # within `held`: path → descriptor and size

    def path(self, name: str) -> str:
        return self._path(name)

    # -- contents ------------------------------------------------------------------------------------------------------

    def put(self, name: str, parts: Iterable[Part], size: int, tick: Tick = nothing) -> tuple[int, ...]:
        return Writer(self._path(name), size, self._direct).write(parts, tick)

    def get(self, name: str, limit: int) -> bytes:
        content = self.head(name, limit + 1)
        if len(content) > limit:
            raise CheckpointError(
                f"{self._path(name)}: more than {limit} bytes, and such a file has fewer: it is not ours"
            )
        return content

    def head(self, name: str, count: int) -> bytes:
        path = self._path(name)
        descriptor, found = self._open(path)
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

    def fetch(
        self,
        name: str,
        size: int,
        checksums: Sequence[int] | None,
        wanted: Sequence[tuple[int, memoryview]],
        tick: Tick = nothing,
    ) -> None:
        self._read(name, size, checksums, tick, wanted)

    def verify(
        self,
        name: str,
        size: int,
        checksums: Sequence[int],
        tick: Tick = nothing,
        numbers: Iterable[int] | None = None,
    ) -> None:
        self._read(name, size, checksums, tick, None, numbers)

    @contextmanager
    def held(self) -> Iterator[bool]:
        held = self._held = {}
        try:
            yield True  # what was just read is in the page cache
        finally:
            self._held = None
            for path, (descriptor, _) in held.items():
                blocks.do("close", path, os.close, descriptor)

    def _read(
        self,
        name: str,
        size: int,
        checksums: Sequence[int] | None,
        tick: Tick,
        wanted: Sequence[tuple[int, memoryview]] | None,
        numbers: Iterable[int] | None = None,
    ) -> None:
        path = self._path(name)
        held = self._held or {}
        try:
            descriptor, found = held.get(path) or self._open(path)
            if self._held is not None and len(held) < HELD:
                self._held[path] = descriptor, found
        except (FileNotFoundError, NotADirectoryError):
            descriptor, found = -1, None
        try:
            check_size(path, found, size, checksums)
            reader = Reader(path, size, checksums, partial(_fill, path, descriptor))
            if wanted is None:
                reader.verify(tick, numbers)
            else:
                reader.fetch(wanted, tick)
        finally:
            if descriptor >= 0 and path not in (self._held or {}):
                blocks.do("close", path, os.close, descriptor)

    def _open(self, path: str) -> tuple[int, int]:
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

    # -- names ---------------------------------------------------------------------------------------------------------

    def list(self, folder: str = "") -> list[str]:
        path, link = self._find(folder)
        if link or (folder and os.path.islink(path)):
            return []
        try:
            return sorted(blocks.do("list", path, os.listdir, path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def modified(self, name: str) -> float:
        path = self._path(name)
        return blocks.do("stat", path, os.lstat, path).st_mtime

    def make(self, folder: str) -> None:
        path = self._path(folder)
        _make_above(path)
        blocks.do("mkdir", path, os.mkdir, path)

    def claim(self, checkpoint: str, said: bytes) -> Claim:
        path = self._path(lock_of(checkpoint))
        _make_above(path)
        try:
            return Lock(path, self._path(checkpoint), said)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        return Marker(self, lock_of(checkpoint), self._path(checkpoint), said)

    def sync(self, folder: str = "") -> None:
        _sync(self._path(folder))

    def rename(self, old: str, new: str) -> None:
        paths = self._path(old), self._path(new)
        blocks.do("rename", paths[0], _rename, *paths)

    def move(self, old: str, new: str) -> None:
        self.rename(old, new)
        self.sync()

    def supplant(self, old: str, new: str) -> None:
        paths = self._path(old), self._path(new)
        blocks.do("replace", paths[0], os.replace, *paths)

    def exchange(self, one: str, other: str) -> bool:
        paths = self._path(one), self._path(other)
        return blocks.do("exchange", paths[0], _renameat2, *paths, EXCHANGE)

    def replace(self, name: str, content: bytes) -> None:
        folder, _, last = name.rpartition("/")
        fresh = f"{folder}/.new-{last}-" if folder else f".new-{last}-"
        for left in self.list(folder):
            if (
                left.startswith(f".new-{last}-")
                and time.time() - self.modified(f"{folder}/{left}" if folder else left) > STALE
            ):
                self.remove(f"{folder}/{left}" if folder else left)
        fresh += secrets.token_hex(4)
        paths = self._path(fresh), self._path(name)
        try:
            self.put(fresh, [content], len(content))
            blocks.do("replace", paths[1], os.replace, *paths)
        except OSError:
            self.remove(fresh)
            raise
        self.sync(folder)

    def remove(self, folder: str) -> None:
        path = self._path(folder)
        if folder.strip("/") == "":
            raise CheckpointError(f"{path}: the folder of all checkpoints is not removed")
        try:
            if stat.S_ISDIR(blocks.do("stat", path, os.lstat, path).st_mode):
                commit = f"{path}/{COMMIT}"
                try:
                    blocks.do("unlink", commit, os.unlink, commit)
                    _sync(path)  # or a power failure could keep COMMIT, and not what it stands for
                except FileNotFoundError:
                    pass
            _remove(path)
        except FileNotFoundError:
            pass

    def _path(self, name: str) -> str:
        """Where `name` is.

        Raises:
            CheckpointError: a name that leads out of the folder, or a link on the way.
        """
        path, link = self._find(name)
        if link:
            raise CheckpointError(f"{link}: a link, and links are not followed: put the folder itself there")
        return path

    def _find(self, name: str) -> tuple[str, str]:
        """Where `name` is, and the link on the way, or ""."""
        path, link = self.place, ""
        for word in components(name, self.place):
            link = link or (path if path != self.place and os.path.islink(path) else "")
            path = os.path.join(path, word)
        return path, link


def _fill(path: str, descriptor: int, views: list[memoryview], at: int) -> None:
    while views := [view for view in views if view]:
        count = blocks.do("read", path, os.preadv, descriptor, views, at)
        if not count:
            raise CheckpointError(
                f"{path}: ends at byte {at} while it is read: someone else changes it; load another checkpoint"
            )
        at += count
        views = rest(views, count)


def _make_above(path: str) -> None:
    """The folders that `path` needs above it, on disk."""
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
    """A file, a link itself, or a folder with all that is in it."""
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
