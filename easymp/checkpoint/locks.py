"""A claim by a lock on a file, which the system itself takes back from a dead process."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Mapping
from typing import Any

from . import calls
from .claims import LARGEST, read, refusal

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

_mine: dict[str, bytes] = {}
"""Locks of this process by path: to the system they are all its own, and a second one would succeed."""
_guard = threading.Lock()


class Lock:
    """A claim by a lock of POSIX on the file `path`, which is taken away with it. Not inherited by forked processes, unlike flock's.

    Raises:
        CheckpointError: another process, or another thread of this one, has it.
        OSError: there are no locks here (`errno` is in NO_LOCKS), or the file cannot be made.
    """

    def __init__(self, path: str, place: str, said: bytes) -> None:
        if fcntl is None:
            raise OSError(errno.ENOSYS, "no locks on this system", path)
        self._path = os.path.realpath(path)
        with _guard:
            if self._path in _mine:
                raise refusal(place, read(_mine[self._path]))
            _mine[self._path] = said
        try:
            self._descriptor, self.left = self._open(place)
            os.pwrite(self._descriptor, said, 0)
        except BaseException:
            self._forget()
            raise

    def _open(self, place: str) -> tuple[int, Mapping[str, Any]]:
        while True:
            descriptor = calls.do("open", self._path, os.open, self._path, FLAGS, 0o666)
            try:
                try:
                    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    if error.errno in (errno.EACCES, errno.EAGAIN):
                        raise refusal(place, read(os.pread(descriptor, LARGEST, 0)), self._path) from None
                    raise
                if self._is_there(descriptor):
                    left = read(os.pread(descriptor, LARGEST, 0))
                    os.ftruncate(descriptor, 0)
                    return descriptor, left
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # its owner took it away just now: it locks nothing

    def _is_there(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.lstat(self._path))
        except FileNotFoundError:
            return False

    def _forget(self) -> None:
        with _guard:
            _mine.pop(self._path, None)

    def release(self) -> None:
        try:
            calls.do(
                "unlink", self._path, os.unlink, self._path
            )  # before the lock goes: nobody else's is taken away
        except OSError:
            pass  # the folder is gone, or became read-only; without a lock on it the file says nothing
        os.close(self._descriptor)
        self._forget()
