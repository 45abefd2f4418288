"""Lock and commit a folder as a checkpoint, and remove the one that it replaces. One of the two always exists.

Order: lock, folder → files written and fsynced → manifest → folder fsynced → COMMIT → folder fsynced → parent fsynced
→ only then removals, each of which begins with COMMIT. Of several saves of one name the highest number with a COMMIT
counts. Where a folder can be renamed, a save is written under a temporary name and renamed after COMMIT; elsewhere
(object stores) it has its name at once.
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

from ..errors import CheckpointError, join_some
from ..logging import get_logger
from . import folders, storage
from .folders import SaveRecord, checkpoint_of, join, lock_name
from .manifest import COMMIT, MANIFEST
from .storage import LocalStorage, Storage, make_parents, read_small

logger = get_logger(__name__)


def check_name(checkpoint: str) -> None:
    reserved = checkpoint.startswith(folders.TEMPORARY) or checkpoint_of(checkpoint) != checkpoint
    if "/" in checkpoint or not checkpoint or reserved:
        raise CheckpointError(
            f"{checkpoint!r} is not a name for a checkpoint: {folders.TEMPORARY}… and ….save-2 are saves under way; "
            "pass another one"
        )


class Commit:
    """One save's `folder`, on the rank that holds the lock. A checkpoint of its name on another line is renamed."""

    def __init__(self, target: Storage, checkpoint: str, record: SaveRecord) -> None:
        self.record = record
        self._storage, self._checkpoint, self._keep_folder = target, checkpoint, False
        if target.renames:
            self.folder = folders.temporary_name(checkpoint)
        else:
            self.folder = folders.next_save(target.list(), checkpoint)
        self._lock = acquire(target, checkpoint, "" if target.renames else self.folder)
        try:
            clean_up(target, checkpoint, self._lock.previous)
            refuse_foreign(target, checkpoint)
            move_other_line(target, checkpoint, record)
            owners = {owner for name in target.list() if (owner := folders.owner_of(name)) is not None}
            for owner in sorted(owners - {checkpoint}):
                with suppress(CheckpointError), lock_held(target, owner) as previous:  # refused if the writer lives
                    clean_up(target, owner, previous)
            try:
                target.make(self.folder)
            except FileExistsError:
                path = join(target.root, checkpoint)
                raise CheckpointError(
                    f"{path}: another writer was there just now: give this run its own folder"
                ) from None
        except BaseException:
            self._lock.release()
            raise

    def finish(self) -> None:
        """Make the folder the checkpoint. All files and COMMIT are on disk."""
        target, checkpoint, save = self._storage, self._checkpoint, self.folder
        if not target.renames:
            target.sync()
        else:
            save = folders.next_save(target.list(), checkpoint)
            target.rename(self.folder, save)
            try:
                target.sync()
            except OSError:
                # On the disk it may be either way, so both folders stay. The next save cleans up once it has synced.
                self._keep_folder = True
                target.rename(save, self.folder)
                raise
        self._keep_folder = True
        if save == checkpoint:
            return  # there is no older one
        try:  # it counts now; the next save tidies up if this one cannot
            clean_up(target, checkpoint, {})
        except OSError as error:
            logger.warning("%s: older saves stay for now: %s", join(target.root, checkpoint), error)

    def close(self) -> None:
        if not self._keep_folder:
            remove_leftover(self._storage, self.folder)
        self._lock.release()


def clean_up(target: Storage, checkpoint: str, dead_owner: Mapping[str, Any]) -> None:
    """Remove all saves of a locked checkpoint but the one that counts, and leftovers of dead writers."""
    saves = folders.saves_of(target.list(), checkpoint)
    newest = next((save for save in saves if folders.is_committed(target, save)), None)
    outdated = [save for save in saves if save not in (newest, checkpoint)]
    if checkpoint in saves and newest != checkpoint:
        is_foreign = target.renames and target.list(checkpoint) and not folders.is_checkpoint(target, checkpoint)
        if dead_owner.get("folder") == checkpoint or (newest is not None and not is_foreign):
            outdated.append(checkpoint)
    temporary = folders.leftovers_of(target.list(), checkpoint)
    if outdated or temporary:
        target.sync()  # a writer may have died just after its rename: what it replaced goes when that is on disk
    for save in outdated:
        drop(target, save)
    for name in temporary:
        remove_leftover(target, name)
    if target.renames and newest is not None and checkpoint not in target.list():
        target.rename(newest, checkpoint)
        target.sync()


def move_other_line(target: Storage, checkpoint: str, record: SaveRecord) -> None:
    """Rename an existing checkpoint of another line that has the name of the new save."""
    if folders.step_of(checkpoint) is None:
        return
    existing = folders.read_record(target, folders.newest_save(target, checkpoint))
    if existing is None or existing.leads_to(record):
        return
    committed = {checkpoint_of(name) for name in target.list() if target.size(join(name, COMMIT)) is not None}
    name, number = f"{checkpoint}.line-{existing.lineage.line}", 1
    while name in committed:
        number += 1
        name = f"{checkpoint}.line-{existing.lineage.line}-{number}"
    target.remove(name)  # half of a copy, of a run that was killed
    target.move(existing.folder, name)
    path = join(target.root, checkpoint)
    logger.warning("%s is of another line of checkpoints, and is named %s from now on", path, name)


def refuse_foreign(target: Storage, name: str) -> None:
    """Raise CheckpointError if `name` exists and is not a checkpoint, since a save would overwrite it."""
    content = [name] if target.size(name) is not None else target.list(name)
    if content and MANIFEST not in content and COMMIT not in content:
        raise CheckpointError(
            f"{join(target.root, name)} is there and is not a checkpoint ({join_some(content, ', ')}): it would be "
            "replaced, so pass another name"
        )


def retain(target: Storage, record: SaveRecord, limit: int | None) -> None:
    """Write the hint `latest`; of checkpoints before `record` keep only the last `limit`. Errors are logged."""
    if folders.step_of(record.folder) is None:
        return
    try:
        hint = folders.newest_save(target, record.folder).encode() + b"\n"
        target.replace(folders.LATEST, [hint], len(hint))
        if limit is None:
            return
        saves = folders.committed_saves(target)
        older = [save for save in saves if checkpoint_of(save.folder) != record.folder and save.leads_to(record)]
        outdated = older[: max(0, len(older) - limit)]
        lines = {save.lineage.line for save in saves if save not in outdated}
        for save in outdated:
            if save.lineage.line not in lines:
                lines.add(save.lineage.line)
                message = "%s is removed, as total_limit says: it was the last checkpoint of line %s"
                logger.warning(message, save.folder, save.lineage.line)
            with suppress(CheckpointError):  # another process writes it now
                # The lock names the folder, so that the next writer can clean up after a kill.
                with lock_held(target, checkpoint_of(save.folder), save.folder):
                    for folder in reversed(committed_folders(target, checkpoint_of(save.folder))):
                        drop(target, folder)
    except (OSError, CheckpointError) as error:
        logger.warning("%s: older checkpoints stay, as they could not be removed: %s", target.root, error)


def committed_folders(target: Storage, checkpoint: str) -> list[str]:
    """The committed saves of a checkpoint, the newest first."""
    return [save for save in folders.saves_of(target.list(), checkpoint) if folders.is_committed(target, save)]


def drop(target: Storage, folder: str) -> None:
    """Remove a checkpoint that the caller has locked. Its COMMIT is removed first."""
    if target.renames:
        temporary = folders.temporary_name(checkpoint_of(folder))
        target.rename(folder, temporary)
        target.sync()
        folder = temporary
    remove_leftover(target, folder)


def remove_leftover(target: Storage, folder: str) -> None:
    """Remove an uncommitted leftover. Failures are logged and ignored."""
    try:
        target.remove(folder)
    except OSError as error:
        logger.warning("%s counts no longer, and could not be removed: %s", join(target.root, folder), error)


# One process at a time writes a checkpoint. A `KernelLock` is a POSIX lock on a file, which the system takes back from
# a dead process, and which forked children do not inherit (flock's they do). Where there are none (object stores, some
# network file systems) a `Heartbeat` is a file that its owner writes anew every few seconds. Either file says who owns
# it: host, process, since when.


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
