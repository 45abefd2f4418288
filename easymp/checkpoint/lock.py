"""Writer locks: one process at a time writes a checkpoint. The lock of a dead process is void.

A `KernelLock` is a POSIX lock on a file, which the system takes back from a dead process, and which forked children do not inherit (flock's
they do). Where there are none (object stores, some network file systems) a `Heartbeat` is a file that its owner writes anew every few
seconds. Either file says who owns it: host, process, since when.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

from ..errors import CheckpointError
from . import storage_local
from .folders import TEMPORARY
from .storage import Storage
from .storage_local import make_above

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LARGEST = 2**16  # bytes of words about an owner
BEAT = 3.0  # seconds between two writes of a heartbeat
PATIENCE = 4 * BEAT  # seconds without a change after which its owner counts as dead
LONG_AGO = 900.0  # seconds; by two machines' clocks
FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

_guard, _sharing = threading.Lock(), threading.Lock()
_mine: dict[str, bytes] = {}
"""Locks of this process by path: the system would grant it a second one."""
_shared: dict[tuple[int, str], list[Any]] = {}
"""Claims that the Accelerators of a process share, and by how many, by process and place."""


def lock_of(checkpoint: str) -> str:
    return f"{TEMPORARY}{checkpoint}.lock"


def claim(storage: Storage, checkpoint: str, folder: str = "") -> KernelLock | Heartbeat:
    """Lock `checkpoint` for this process until ``release()``. The lock file names the process and `folder`.

    `left` of the result is the content of the previous lock, if its owner died without a release.

    Raises:
        CheckpointError: another process, or another thread of this one, writes it; which.
        OSError: the lock cannot be written.
    """
    name, place = lock_of(checkpoint), f"{storage.place.rstrip('/')}/{checkpoint}"
    path = storage.path(name)
    if path is not None:
        make_above(path)
        try:
            return KernelLock(path, place, words(folder))
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
    return Heartbeat(storage, name, place, words(folder))


def hold(storage: Storage, name: str) -> Callable[[], None]:
    """Lock `name` for this process; several holders in one process share it. Returns the function that releases it. Raises like `claim`."""
    key = os.getpid(), f"{os.path.realpath(storage.place)}/{name}"
    with _sharing:
        if key not in _shared:
            _shared[key] = [claim(storage, name), 0]
        _shared[key][1] += 1
    return partial(_let_go, key)


def _let_go(key: tuple[int, str]) -> None:
    if key[0] != os.getpid():
        return  # a fork, which has nothing of its parent's
    with _sharing:
        _shared[key][1] -= 1
        if not _shared[key][1]:
            _shared.pop(key)[0].release()


# -- who owns it ------------------------------------------------------------------------------------------------------


def words(folder: str = "") -> bytes:
    """The content of a lock: this process, and the folder that it writes."""
    me = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
        "space": pid_namespace(),
        "started": started(os.getpid()),
    }
    return json.dumps({**me, "folder": folder} if folder else me).encode()


def pid_namespace() -> str:
    """Identifier of the running machine and PID namespace, within which a process number is unique; "" where the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def started(pid: int) -> str:
    """Start time of a process in kernel ticks, which tells it from a later process with the same number; "" if unknown."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return ""


def read_words(said: bytes) -> Mapping[str, Any]:
    """Read the content of a lock; empty if its owner was killed before it wrote."""
    try:
        found = json.loads(said)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def refusal(place: str, owner: Mapping[str, Any], lock: str = "") -> CheckpointError:
    """The error for a second writer of `place`; `lock` is the file of the lock."""
    who = f"process {owner.get('pid', '?')} on {owner.get('host', 'an unknown host')}{_since(owner.get('since'))}"
    lost = lock and owner.get("host") != socket.gethostname()
    return CheckpointError(
        f"{place} is being written by {who}, and two writers would only overtake each other: give this run a folder of its own, or wait "
        f"until that one is done{f'. If that machine is gone, remove {lock}' if lost else ''}"
    )


def _since(said: object) -> str:
    try:
        seconds = int((datetime.now(UTC) - datetime.fromisoformat(str(said))).total_seconds())
    except (ValueError, TypeError):
        return ""
    units = ((86400, "days"), (3600, "h"), (60, "min"))
    age = next((f"{seconds // n} {unit}" for n, unit in units if seconds >= 2 * n), f"{seconds} s")
    return f" since {said} ({age})"


# -- kinds of locks ---------------------------------------------------------------------------------------------------


class KernelLock:
    """A POSIX lock on the file `path`, which `release` removes. See `claim`. Raises an OSError of NO_LOCKS if there are no locks."""

    def __init__(self, path: str, place: str, said: bytes) -> None:
        if fcntl is None:
            raise OSError(errno.ENOSYS, "no locks on this system", path)
        self._path = os.path.realpath(path)
        with _guard:
            if self._path in _mine:
                raise refusal(place, read_words(_mine[self._path]))
            _mine[self._path] = said
        try:
            self._descriptor, self.left = self._lock(place)
            os.pwrite(self._descriptor, said, 0)
        except BaseException:
            _mine.pop(self._path, None)
            raise

    def _lock(self, place: str) -> tuple[int, Mapping[str, Any]]:
        while True:
            descriptor = storage_local.do("open", self._path, os.open, self._path, FLAGS, 0o666)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left = read_words(os.pread(descriptor, LARGEST, 0))
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(descriptor), os.lstat(self._path)):
                        os.ftruncate(descriptor, 0)
                        return descriptor, left
            except BaseException as error:
                left = read_words(os.pread(descriptor, LARGEST, 0))
                os.close(descriptor)
                if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EAGAIN):
                    raise refusal(place, left, self._path) from None
                raise
            os.close(descriptor)  # its owner removed it just now: it locks nothing

    def release(self) -> None:
        # Unlinked while it is locked, so that another owner's is not removed. An error: the folder is gone, or became read-only;
        # without a lock on it the file means nothing.
        with suppress(OSError):
            storage_local.do("unlink", self._path, os.unlink, self._path)
        os.close(self._descriptor)
        _mine.pop(self._path, None)


class Heartbeat:
    """Lock file with a heartbeat: a thread rewrites `name` of `storage` every BEAT seconds. See `claim`."""

    def __init__(self, storage: Storage, name: str, place: str, said: bytes) -> None:
        self._storage, self._name = storage, name
        self._said, self._count = {**read_words(said), "claim": os.urandom(8).hex()}, 0
        self.left = self._wait(place)
        self._write()
        if (now := _owner(storage, name)).get("claim") != self._said["claim"]:
            raise refusal(place, now)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="easymp-claim", daemon=True)
        self._thread.start()

    def _wait(self, place: str) -> Mapping[str, Any]:
        """Wait for a beat: return the content if the owner is dead, raise if it is alive."""
        there = _owner(self._storage, self._name)
        until = time.monotonic() + PATIENCE
        while there and not abandoned(self._storage, self._name) and time.monotonic() < until:
            time.sleep(BEAT / 10)
            now = _owner(self._storage, self._name)
            if now and now != there:
                raise refusal(place, now)
            there = now
        return there

    def _write(self) -> None:
        self._count += 1
        self._storage.replace(self._name, json.dumps({**self._said, "count": self._count}).encode())

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            with suppress(OSError):  # the writes of the checkpoint itself fail likewise
                self._write()

    def release(self) -> None:
        self._over.set()
        self._thread.join()
        with suppress(OSError):  # the next writer finds it, and finds it old
            self._storage.remove(self._name)


def abandoned(storage: Storage, name: str) -> bool:
    """Whether the owner of a heartbeat is known to be dead, without waiting for a beat."""
    owner = _owner(storage, name)
    here = socket.gethostname(), pid_namespace()
    if (owner.get("host"), owner.get("space", here[1])) == here and type(owner.get("pid")) is int:
        try:
            os.kill(owner["pid"], 0)
            if owner.get("started", "") != started(owner["pid"]) != "" != owner.get("started", ""):
                return True  # another process has that number now
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            pass
    try:
        return time.time() - storage.modified(name) > LONG_AGO
    except OSError:
        return False


def _owner(storage: Storage, name: str) -> Mapping[str, Any]:
    try:
        return read_words(storage.get(name, LARGEST))
    except (FileNotFoundError, CheckpointError):
        return {}
