"""Who writes a checkpoint, in words: one process at a time, and one that dies owns nothing any more. See `locks` and `markers`."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

from ..errors import CheckpointError
from . import blocks, codec
from .storage import Claim, Storage

LARGEST = 2**16  # bytes of words about an owner

_held: dict[tuple[int, str], list[Any]] = {}
"""Claims of this process that its Accelerators share, and by how many, by process and place."""
_guard = threading.Lock()


def words(**more: str) -> bytes:
    """Who this process is, for those who come second."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    me = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": since,
        "space": pid_namespace(),
        "started": started(os.getpid()),
    }
    return codec.dumps({**me, **more})


def pid_namespace() -> str:
    """Identifier of the running machine and PID namespace, within which a process number is unique; "" where the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def started(pid: int) -> str:
    """When a process was started, as the system counts: another one that gets its number later has another; "" where that is not told."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return ""


def hold(storage: Storage, name: str) -> Callable[[], None]:
    """Claim `name` for this process, in which others may hold it too; what is returned lets go of it.

    Raises:
        CheckpointError: another process has it.
        OSError: `storage` cannot be written to.
    """
    key = os.getpid(), f"{os.path.realpath(storage.place)}/{name}"
    with _guard:
        if key not in _held:
            _held[key] = [storage.claim(name, words()), 0]
        _held[key][1] += 1
    return partial(_let_go, key)


def _let_go(key: tuple[int, str]) -> None:
    if key[0] != os.getpid():
        return  # a fork, which has nothing of its parent's
    with _guard:
        _held[key][1] -= 1
        if not _held[key][1]:
            claim: Claim = _held.pop(key)[0]
            claim.release()


def read(said: bytes) -> Mapping[str, Any]:
    """The words of an owner; nothing where it was killed before it could say them."""
    try:
        found = json.loads(said)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def refusal(place: str, owner: Mapping[str, Any], lock: str = "") -> CheckpointError:
    """What the second writer of `place` is told. `lock` is a file that a machine which is gone may hold on to."""
    who = f"process {owner.get('pid', '?')} on {owner.get('host', 'a host that it does not name')}"
    return CheckpointError(
        f"{place} is being written by {who}{_since(owner.get('since'))}, and two writers would only overtake each other: give this run a "
        "folder of its own, or wait until that one is done"
        + (
            f". If that machine is gone, remove {lock}"
            if lock and owner.get("host") != socket.gethostname()
            else ""
        )
    )


def _since(said: object) -> str:
    try:
        began = datetime.fromisoformat(str(said))
        seconds = int((datetime.now(UTC) - began).total_seconds())
    except (ValueError, TypeError):
        return ""
    age = next(
        (
            f"{seconds // n} {unit}"
            for n, unit in ((86400, "days"), (3600, "h"), (60, "min"))
            if seconds >= 2 * n
        ),
        f"{seconds} s",
    )
    return f" since {said} ({age})"


# -- A claim by a lock on a file, which the system itself takes back from a dead process.


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

_mine: dict[str, bytes] = {}
"""Locks of this process by path: to the system they are all its own, and a second one would succeed."""


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
            descriptor = blocks.do("open", self._path, os.open, self._path, FLAGS, 0o666)
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
            blocks.do(
                "unlink", self._path, os.unlink, self._path
            )  # before the lock goes: nobody else's is taken away
        except OSError:
            pass  # the folder is gone, or became read-only; without a lock on it the file says nothing
        os.close(self._descriptor)
        self._forget()


# -- A claim where there are no locks: a file that is written anew every few seconds; one that stops changing is nobody's.


BEAT = 3.0  # seconds between two writes of a marker
PATIENCE = 4 * BEAT  # one that has not changed for so long is nobody's
LONG_AGO = 900.0  # seconds; by two machines' clocks


class Marker:
    """A claim by the file `name` of `storage`, which a thread writes anew every BEAT seconds.

    Raises:
        CheckpointError: somebody else does.
        OSError: it cannot be written.
    """

    def __init__(self, storage: Storage, name: str, place: str, said: bytes) -> None:
        self._storage, self._name = storage, name
        self._said, self._count = {**read(said), "claim": os.urandom(8).hex()}, 0
        self.left = self._wait(place)
        self._write()
        if self._read().get("claim") != self._said["claim"]:
            raise refusal(place, self._read())
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="easymp-claim", daemon=True)
        self._thread.start()

    def _wait(self, place: str) -> Mapping[str, Any]:
        """What a dead owner left; raises when it turns out to be alive."""
        there = self._read()
        until = time.monotonic() + PATIENCE
        while there and not abandoned(self._storage, self._name) and time.monotonic() < until:
            time.sleep(BEAT / 10)
            now = self._read()
            if now and now != there:
                raise refusal(place, now)
            there = now
        return there

    def _read(self) -> Mapping[str, Any]:
        return _owner(self._storage, self._name)

    def _write(self) -> None:
        self._count += 1
        self._storage.replace(self._name, codec.dumps({**self._said, "count": self._count}))

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            try:
                self._write()
            except OSError:
                pass  # the writes of the checkpoint itself meet the same

    def release(self) -> None:
        self._over.set()
        self._thread.join()
        try:
            self._storage.remove(self._name)
        except OSError:
            pass  # it will be found, and found old


def abandoned(storage: Storage, name: str) -> bool:
    """Whether it is certain, without watching it for a while, that nobody writes a marker any more."""
    owner = _owner(storage, name)
    if (
        owner.get("host") == socket.gethostname()
        and owner.get("space", pid_namespace()) == pid_namespace()
        and type(owner.get("pid")) is int
    ):
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
        return read(storage.get(name, LARGEST))
    except (FileNotFoundError, CheckpointError):
        return {}


TEMPORARY = ".tmp-"


def lock_of(checkpoint: str) -> str:
    return f"{TEMPORARY}{checkpoint}.lock"
