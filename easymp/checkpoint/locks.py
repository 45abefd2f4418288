"""Writer locks: one process at a time writes a checkpoint.

A `KernelLock` is a POSIX lock on a file. The system releases it when the process dies, and forked children do not
inherit it (unlike flock's). Object stores and some network file systems have none: there a `Heartbeat` is used, a file
that its owner rewrites every few seconds. Either file has its owner's host, process and start time.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from ..errors import CheckpointError
from . import storage
from .storage import LocalStorage, Storage, make_parents, read_small

TEMPORARY = ".tmp-"
LARGEST = 2**16  # bytes of an owner's record
BEAT = 3.0  # seconds between two writes of a heartbeat
PATIENCE = 4 * BEAT  # seconds without a change after which its owner counts as dead
FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

_guard, _sharing = threading.Lock(), threading.Lock()
_owned: dict[str, Mapping[str, Any]] = {}
"""Locks of this process by path: the system would grant it a second one."""
_shared: dict[tuple[int, str], list[Any]] = {}
"""Locks that the Accelerators of a process share, and by how many, by process and path."""


def lock_name(checkpoint: str) -> str:
    return f"{TEMPORARY}{checkpoint}.lock"


def acquire(target: Storage, checkpoint: str, folder: str = "") -> KernelLock | Heartbeat:
    """Lock `checkpoint` for this process until ``release()``; CheckpointError says who else writes it."""
    name, subject = lock_name(checkpoint), f"{target.root.rstrip('/')}/{checkpoint}"
    if isinstance(target, LocalStorage):
        path = target.local_path(name)
        make_parents(path)
        try:
            return KernelLock(path, subject, owner_record(folder))
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
    return Heartbeat(target, name, subject, owner_record(folder))


@contextmanager
def lock_held(target: Storage, checkpoint: str, folder: str = "") -> Iterator[Mapping[str, Any]]:
    """Hold the lock of `checkpoint`; yields the record of a dead owner, or an empty one."""
    lock = acquire(target, checkpoint, folder)
    try:
        yield lock.previous
    finally:
        lock.release()


def acquire_shared(target: Storage, name: str) -> Callable[[], None]:
    """Lock `name` for all users in this process; returns the function that releases it. Raises like `acquire`."""
    key = os.getpid(), f"{os.path.realpath(target.root)}/{name}"
    with _sharing:
        if key not in _shared:
            _shared[key] = [acquire(target, name), 0]
        _shared[key][1] += 1

    def release() -> None:
        if key[0] != os.getpid():
            return  # a fork, which has nothing of its parent's
        with _sharing:
            _shared[key][1] -= 1
            if not _shared[key][1]:
                _shared.pop(key)[0].release()

    return release


def owner_record(folder: str = "") -> dict[str, Any]:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": since, "folder": folder}


def parse_owner(content: bytes) -> Mapping[str, Any]:
    """Read the content of a lock; empty if its owner was killed before it wrote."""
    try:
        record = json.loads(content)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def refusal(subject: str, owner: Mapping[str, Any], lock: str = "") -> CheckpointError:
    """The error for a second writer; `lock` is the file of the lock."""
    process = f"process {owner.get('pid', '?')} on {owner.get('host', 'an unknown host')}"
    if "since" in owner:
        process += f" since {owner['since']}"
    remedy = f". If that machine is gone, remove {lock}" if lock and owner.get("host") != socket.gethostname() else ""
    return CheckpointError(
        f"{subject} is being written by {process}, and two writers would only overtake each other: give this run a "
        f"folder of its own, or wait until that one is done{remedy}"
    )


class KernelLock:
    """A POSIX lock on the file `path`, which `release` removes; an OSError of NO_LOCKS where there are none."""

    def __init__(self, path: str, subject: str, record: Mapping[str, Any]) -> None:
        self._path = os.path.realpath(path)
        with _guard:
            if self._path in _owned:
                raise refusal(subject, _owned[self._path])
            _owned[self._path] = record
        try:
            self._descriptor, self.previous = self._lock(subject)
            os.pwrite(self._descriptor, json.dumps(record).encode(), 0)
        except BaseException:
            _owned.pop(self._path, None)
            raise

    def _lock(self, subject: str) -> tuple[int, Mapping[str, Any]]:
        while True:
            descriptor = storage.do("open", self._path, os.open, self._path, FLAGS, 0o666)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                previous = parse_owner(os.pread(descriptor, LARGEST, 0))
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(descriptor), os.lstat(self._path)):
                        os.ftruncate(descriptor, 0)
                        return descriptor, previous
            except BaseException as error:
                owner = parse_owner(os.pread(descriptor, LARGEST, 0))
                os.close(descriptor)
                if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EAGAIN):
                    raise refusal(subject, owner, self._path) from None
                raise
            os.close(descriptor)  # its owner removed it just now: it locks nothing

    def release(self) -> None:
        # Unlinked while it is locked, so that another owner's is not removed. An error: the folder is gone, or became
        # read-only; without a lock on it the file means nothing.
        with suppress(OSError):
            storage.do("unlink", self._path, os.unlink, self._path)
        os.close(self._descriptor)
        _owned.pop(self._path, None)


class Heartbeat:
    """Lock file with a heartbeat: a thread rewrites `name` of a storage every BEAT seconds. See `acquire`."""

    def __init__(self, target: Storage, name: str, subject: str, record: Mapping[str, Any]) -> None:
        self._storage, self._name, self._count = target, name, 0
        self._record = {**record, "claim": os.urandom(8).hex()}
        self.previous = self._wait(subject)
        self._write()
        if (owner := _read_owner(target, name)).get("claim") != self._record["claim"]:
            raise refusal(subject, owner)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="easymp-claim", daemon=True)
        self._thread.start()

    def _wait(self, subject: str) -> Mapping[str, Any]:
        """Wait for a beat: return the content if the owner is dead, raise if it is alive."""
        previous = _read_owner(self._storage, self._name)
        deadline = time.monotonic() + PATIENCE
        while previous and time.monotonic() < deadline:
            time.sleep(BEAT / 10)
            owner = _read_owner(self._storage, self._name)
            if owner and owner != previous:
                raise refusal(subject, owner)
            previous = owner
        return previous

    def _write(self) -> None:
        self._count += 1
        content = json.dumps({**self._record, "count": self._count}).encode()
        self._storage.replace(self._name, [content], len(content))

    def _beat(self) -> None:
        while not self._stop.wait(BEAT):
            with suppress(OSError):  # the writes of the checkpoint itself fail likewise
                self._write()

    def release(self) -> None:
        self._stop.set()
        self._thread.join()
        with suppress(OSError):  # the next writer finds it, and finds it old
            self._storage.remove(self._name)


def _read_owner(target: Storage, name: str) -> Mapping[str, Any]:
    try:
        return parse_owner(read_small(target, name, LARGEST))
    except (FileNotFoundError, CheckpointError):
        return {}
