"""Lock and commit a folder as a checkpoint, and remove the one that it replaces. One of the two exists at every instant.

The order of a save: claim, folder → every file written and fsynced → manifest → folder fsynced → COMMIT → folder fsynced → renamed → parent
folder fsynced → only then removals. Where folders can be renamed (`Renamed`), a checkpoint is written under a temporary name, and the last
step gives it its own, or swaps it with the one that it replaces. Elsewhere (`InPlace`: object stores) each save has a folder of its own,
and COMMIT, which is written last, decides which counts.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

from ..errors import CheckpointError
from ..logging import get_logger
from . import folders, storage_local
from .folders import Saved
from .manifest import COMMIT, MANIFEST
from .storage import Storage
from .storage_local import make_above

logger = get_logger(__name__)


def begin(storage: Storage, checkpoint: str, by: Saved | None = None) -> Commit:
    """Lock `checkpoint` of `storage`, clean up after dead writers, and make the folder of the new save.

    `by` is the lineage of the new save: a checkpoint of this name on another line is renamed. Without it, one is replaced.
    """
    if storage.renames:
        return Renamed(storage, checkpoint, folders.temporary(checkpoint), by)
    return InPlace(storage, checkpoint, folders.next_save(storage.list(), checkpoint), by)


def check_name(checkpoint: str) -> None:
    """Raises CheckpointError for a name that a checkpoint cannot have."""
    reserved = checkpoint.startswith(folders.TEMPORARY) or folders.checkpoint_of(checkpoint) != checkpoint
    if "/" in checkpoint or not checkpoint or reserved:
        said = f"{checkpoint!r} is not a name for a checkpoint"
        raise CheckpointError(
            f"{said}: {folders.TEMPORARY}… and ….save-2 are saves under way; pass another one"
        )


class Commit(ABC):
    """One save's `folder`, on the rank that claimed the checkpoint."""

    def __init__(self, storage: Storage, checkpoint: str, folder: str, by: Saved | None) -> None:
        self._storage, self._checkpoint, self.folder, self._keep = storage, checkpoint, folder, False
        self._claim = claim(storage, checkpoint, "" if storage.renames else folder)
        try:
            self._settle(by)
            storage.make(folder)
        except BaseException:
            self._claim.release()
            raise

    @abstractmethod
    def _settle(self, by: Saved | None) -> None:
        """Finish or remove the leftovers of dead writers, and make room for the new checkpoint."""

    @abstractmethod
    def finish(self) -> None:
        """Make the folder the checkpoint. All files and COMMIT are on disk."""

    def close(self) -> None:
        """Remove an uncommitted folder, and release the lock."""
        if not self._keep:
            take_away(self._storage, self.folder)
        self._claim.release()


class Renamed(Commit):
    """Commit by renaming the folder."""

    def _settle(self, by: Saved | None) -> None:
        storage, checkpoint = self._storage, self._checkpoint
        refuse_foreign(storage, checkpoint)
        saves = folders.saves_of(storage.list(), checkpoint)
        if saves not in ([], [checkpoint]):  # where names cannot be swapped, a dead writer may have left two
            counts = next((save for save in saves if folders.is_committed(storage, save)), checkpoint)
            for save in saves:
                if save != counts:
                    drop(storage, save)
            if counts != checkpoint:
                storage.rename(counts, checkpoint)
                storage.sync()
        set_aside(storage, checkpoint, by)
        left: dict[str, list[str]] = {}
        for name in storage.list():
            if (owner := folders.writing(name)) and name != lock_of(checkpoint):
                left.setdefault(owner, []).append(name)
        if left:
            storage.sync()  # a writer may have died just after a swap: what it replaced goes when that is on disk
        for owner, names in left.items():
            try:
                lock = claim(storage, owner) if owner != checkpoint else None
            except CheckpointError:
                continue  # it lives
            for name in names:
                if name != lock_of(owner):
                    take_away(storage, name)
            if lock is not None:
                lock.release()

    def finish(self) -> None:
        storage, name = self._storage, self._checkpoint
        there = storage.list()
        if name not in there:
            storage.rename(self.folder, name)
            storage.sync()
        elif storage.exchange(self.folder, name):
            try:
                storage.sync()
            except OSError:
                # On the disk it may be either way now, so both folders stay. The next save cleans up once it has synced.
                self._keep = True
                storage.exchange(self.folder, name)
                raise
        else:
            self._finish_beside(folders.next_save(there, name))

    def _finish_beside(self, second: str) -> None:
        """Commit under a second name until the first one is free, since names cannot be swapped here."""
        storage, name = self._storage, self._checkpoint
        storage.rename(self.folder, second)
        try:
            storage.sync()
        except OSError:
            self._keep = True
            storage.rename(second, self.folder)
            raise
        try:  # it counts now; the rest is tidying, which the next save does if this one cannot
            drop(storage, name)
            storage.rename(second, name)
            storage.sync()
        except OSError as error:
            logger.warning("%s is %s for now: %s", folders.inside(storage.place, name), second, error)


class InPlace(Commit):
    """Commit by a file that is written last."""

    def _settle(self, by: Saved | None) -> None:
        storage, checkpoint = self._storage, self._checkpoint
        _remove_uncommitted(storage, checkpoint, self._claim.left)
        if storage.list(self.folder):
            place = folders.inside(storage.place, checkpoint)
            raise CheckpointError(f"{place}: another writer was there just now: give this run its own folder")
        refuse_foreign(storage, checkpoint)
        set_aside(storage, checkpoint, by)
        for name in storage.list():
            owner = folders.writing(name)
            if owner is not None and owner != checkpoint and abandoned(storage, name):
                lock = claim(storage, owner)
                _remove_uncommitted(storage, owner, lock.left)
                lock.release()

    def finish(self) -> None:
        self._storage.sync()
        self._keep = True
        for save in folders.saves_of(self._storage.list(), self._checkpoint):
            if save != self.folder:
                take_away(self._storage, save)


def _remove_uncommitted(storage: Storage, checkpoint: str, left: Mapping[str, Any]) -> None:
    """Remove a dead writer's files of this checkpoint; `left` is the lock's content, which names its folder."""
    saves = folders.saves_of(storage.list(), checkpoint)
    counts = next((save for save in saves if folders.is_committed(storage, save)), None)
    for save in saves:
        ours = counts is not None or save != checkpoint or save == left.get("folder")
        if save != counts and ours:
            take_away(storage, save)


# -- removal: a checkpoint stops counting before its first file goes, and only once a newer one is on disk -------------


def retain(storage: Storage, it: Saved, limit: int | None) -> None:
    """After `it` is committed: write the hint `latest`, and keep only the last `limit` of the others on its line. Errors are logged."""
    if folders.step_of(it.folder) is None:
        return
    try:
        storage.replace(folders.LATEST, folders.current(storage, it.folder).encode() + b"\n")
        if limit is None:
            return
        there = folders.committed(storage)
        others = [
            other
            for other in there
            if folders.checkpoint_of(other.folder) != it.folder and other.leads_to(it)
        ]
        gone = others[: max(0, len(others) - limit)]
        stay = {other.lineage.line for other in there if other not in gone}
        for other in gone:
            if other.lineage.line not in stay:
                stay.add(other.lineage.line)
                words = "%s is removed, as total_limit says: it was the last checkpoint of line %s"
                logger.warning(words, other.folder, other.lineage.line)
            _retire(storage, folders.checkpoint_of(other.folder), other.folder)
    except (OSError, CheckpointError) as error:
        logger.warning("%s: older checkpoints stay, as they could not be removed: %s", storage.place, error)


def _retire(storage: Storage, checkpoint: str, folder: str) -> None:
    try:
        lock = claim(storage, checkpoint, folder)  # the next writer learns what was left half done
    except CheckpointError:
        return  # another process writes it now
    try:
        for save in committed_saves(storage, checkpoint):
            drop(storage, save)
    finally:
        lock.release()


def committed_saves(storage: Storage, checkpoint: str) -> list[str]:
    """The committed saves of a checkpoint, the oldest first. The newest is the checkpoint."""
    return [
        save
        for save in reversed(folders.saves_of(storage.list(), checkpoint))
        if folders.is_committed(storage, save)
    ]


def drop(storage: Storage, folder: str) -> None:
    """Remove a checkpoint that the caller has locked. Its COMMIT is removed first."""
    if storage.renames:
        gone = folders.temporary(folders.checkpoint_of(folder))
        storage.rename(folder, gone)
        storage.sync()
        folder = gone
    take_away(storage, folder)


def take_away(storage: Storage, folder: str) -> None:
    """Remove an uncommitted leftover. Failures are logged and ignored."""
    try:
        storage.remove(folder)
    except OSError as error:
        place = folders.inside(storage.place, folder)
        logger.warning("%s counts no longer, and could not be removed: %s", place, error)


def set_aside(storage: Storage, checkpoint: str, by: Saved | None) -> None:
    """Rename an existing checkpoint of another line that has the name of the new save `by`."""
    if by is None or folders.step_of(checkpoint) is None:
        return
    there = folders.saved_in(storage, folders.current(storage, checkpoint))
    if there is None or there.leads_to(by):
        return
    named = [name for name in storage.list() if storage.size(folders.inside(name, COMMIT)) is not None]
    name = folders.aside(named, checkpoint, there.lineage.line)
    storage.remove(name)  # half of a copy, of a run that was killed
    storage.move(there.folder, name)
    place = folders.inside(storage.place, checkpoint)
    logger.warning("%s is of another line of checkpoints, and is named %s from now on", place, name)


def refuse_foreign(storage: Storage, name: str) -> None:
    """Raise CheckpointError if `name` exists and is not a checkpoint, since a save would overwrite it."""
    there = [name] if storage.size(name) is not None else storage.list(name)
    if there and MANIFEST not in there and COMMIT not in there:
        found = ", ".join(there[:5]) + (" …" if len(there) > 5 else "")
        raise CheckpointError(
            f"{folders.inside(storage.place, name)} is there and is not a checkpoint ({found}): it would be replaced, so pass another name"
        )


# -- writer locks -----------------------------------------------------------------------------------------------------
#
# One process at a time writes a checkpoint. A `KernelLock` is a POSIX lock on a file, which the system takes back from a dead process, and
# which forked children do not inherit (flock's they do). Where there are none (object stores, some network file systems) a `Heartbeat` is a
# file that its owner writes anew every few seconds. Either file says who owns it: host, process, since when.


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
    return f"{folders.TEMPORARY}{checkpoint}.lock"


def claim(storage: Storage, checkpoint: str, folder: str = "") -> KernelLock | Heartbeat:
    """Lock `checkpoint` for this process until ``release()``; CheckpointError says who else writes it. The lock names process and `folder`.

    `left` of the result is the content of the previous lock, if its owner died without a release.
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
