"""The folders of checkpoints below a root: names, which of them count, how one is opened, their order, and commits.

| name | content |
|---|---|
| ``step-00000100`` | the checkpoint of step 100; users may choose other names |
| ``step-00000100.save-2`` | the same, saved again; of those with a COMMIT, the highest number counts |
| ``step-00000100.line-1c9e02d7`` | the same, of another line of saves; renamed since the current line has it, too |
| ``.tmp-step-00000100-5f0c3a9e`` | a folder being written, or replaced, or removed; never a checkpoint |
| ``.tmp-step-00000100.lock`` | the owner of the writer lock |
| ``latest`` | a file with the name of the checkpoint that was saved last: a hint for people |

A save commits in this order: lock, folder → files written and fsynced → manifest → folder fsynced → COMMIT → folder
fsynced → parent fsynced → only then removals, each of which begins with COMMIT. So the checkpoint or the one that it
replaces always exists. Where a folder can be renamed, a save is written under a temporary name and renamed after
COMMIT; elsewhere (object stores) it has its name at once.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError, NoCheckpointError, join_some
from ..logging import get_logger
from .codec import LONGEST
from .locks import TEMPORARY, acquire, lock_held, lock_name
from .manifest import COMMIT, MANIFEST, Lineage, Manifest, decode, decode_head, seal
from .storage import LocalStorage, SourceFile, Storage, read_small
from .storage_remote import RemoteStorage

logger = get_logger(__name__)
HEAD = 2**16  # bytes of a manifest in which its plan usually ends
LATEST = "latest"
SEAL = 65  # bytes of COMMIT: a SHA-256 in hexadecimal and a line feed
# Ours, and Accelerate's automatic names.
_STEP = re.compile(r"(?:step-(?=\d{8})|checkpoint_)(\d+)(\.line-[0-9a-f]+(-\d+)?)?")
_SAVE = re.compile(r"(.+)\.save-(\d+)")
_TEMPORARY = re.compile(r"\.tmp-(.+)(-[0-9a-f]{8}|\.lock)")


def join(folder: str, name: str) -> str:
    """Join `folder` and `name`; either may be ""."""
    return f"{folder.rstrip('/')}/{name}" if folder and name else folder or name


def step_of(folder: str) -> int | None:
    match = _STEP.fullmatch(checkpoint_of(folder))
    return int(match[1]) if match else None


def checkpoint_of(folder: str) -> str:
    """The checkpoint's name without the number of the save."""
    match = _SAVE.fullmatch(folder)
    return match[1] if match else folder


def save_number(folder: str) -> int:
    match = _SAVE.fullmatch(folder)
    return int(match[2]) if match else 1


def saves_of(names: Iterable[str], checkpoint: str) -> list[str]:
    """The saves of one checkpoint among folders, the newest first; committed or not."""
    return sorted((n for n in names if checkpoint_of(n) == checkpoint), key=save_number, reverse=True)


def next_save(names: Iterable[str], checkpoint: str) -> str:
    saves = saves_of(names, checkpoint)
    return f"{checkpoint}.save-{save_number(saves[0]) + 1}" if saves else checkpoint


def temporary_name(checkpoint: str) -> str:
    return f"{TEMPORARY}{checkpoint}-{secrets.token_hex(4)}"


def owner_of(name: str) -> str | None:
    """The checkpoint that a temporary folder or lock belongs to; None for other names."""
    match = _TEMPORARY.fullmatch(name)
    return match[1] if match else None


def leftovers_of(names: Iterable[str], checkpoint: str) -> list[str]:
    return [name for name in names if owner_of(name) == checkpoint and name != lock_name(checkpoint)]


def read_sealed(storage: Storage, folder: str) -> bytes:
    """The text of the manifest in `folder` of `storage` ("" for `storage` itself); CheckpointError unless sealed."""

    def content(name: str, limit: int) -> bytes | None:
        try:
            return read_small(storage, join(folder, name), limit)
        except (FileNotFoundError, NotADirectoryError):
            return None

    commit, manifest = content(COMMIT, SEAL), content(MANIFEST, LONGEST)
    if commit is None and manifest is None:
        fault = f"not a checkpoint: neither {MANIFEST} nor {COMMIT} is there; pass the folder of one step"
        raise NoCheckpointError(f"{join(storage.root, folder)}: {fault}")
    if commit is None:
        fault = f"not committed: {COMMIT} is missing, so the save did not end; load an earlier checkpoint"
    elif manifest is None:
        fault = f"{MANIFEST} is missing though {COMMIT} is there: load another checkpoint"
    elif commit == seal(manifest):
        return manifest
    else:
        fault = f"{MANIFEST} is not what {COMMIT} seals: one of them was changed; load another checkpoint"
    raise CheckpointError(f"{join(storage.root, folder)}: {fault}")


def is_committed(storage: Storage, folder: str) -> bool:
    """Whether `folder` holds a manifest and the COMMIT that seals it. The manifest is not decoded."""
    try:
        read_sealed(storage, folder)
    except CheckpointError:
        return False
    return True


def is_checkpoint(names: Collection[str]) -> bool:
    """Whether a folder with these files is a checkpoint, whole or not."""
    return MANIFEST in names or COMMIT in names


def newest_save(storage: Storage, checkpoint: str) -> str:
    """The folder of the newest committed save of `checkpoint`; the plain name if none is committed."""
    names = storage.list()
    if not any(name.startswith(f"{checkpoint}.save-") for name in names):
        return checkpoint
    return next((folder for folder in saves_of(names, checkpoint) if is_committed(storage, folder)), checkpoint)


def open_storage(path: str | os.PathLike[str]) -> Storage:
    """The folder at a path or ``file://`` URL of this machine, or at another URL by fsspec. Nothing is read or made."""
    path = os.fspath(path)
    protocol, mark, tail = path.partition("://")
    if not mark or "/" in protocol:
        return LocalStorage(path)
    if protocol not in ("file", "local"):
        return RemoteStorage(path)
    tail = tail.removeprefix("localhost")
    if not tail.startswith("/"):
        raise CheckpointError(f"{path} names a machine, not a folder: write {protocol}:///{tail}, or the path")
    return LocalStorage(tail)


def split(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Split a path or URL into its parent folder and its name. A link to a folder is followed."""
    path = os.fspath(path)
    protocol, mark, tail = path.partition("://")
    if not mark:
        path = os.path.abspath(path)
        return os.path.split(os.path.realpath(path) if os.path.isdir(path) else path)
    folder, _, name = tail.rstrip("/").rpartition("/")
    return f"{protocol}://{folder}", name


def open_parent(path: str | os.PathLike[str]) -> tuple[Storage, str]:
    """The folder above a path or URL, and the name in it."""
    folder, name = split(path)
    return open_storage(folder), name


class OpenCheckpoint(NamedTuple):
    """A committed checkpoint: `folder` of `storage`, and its manifest."""

    storage: Storage
    folder: str
    manifest: Manifest

    @property
    def path(self) -> str:
        return join(self.storage.root, self.folder)

    @property
    def files(self) -> dict[str, SourceFile]:
        """All files, those of hooks, too."""
        return {
            name: SourceFile(self.storage, join(self.folder, name), file.size, file.checksums)
            for name, file in self.manifest.all_files.items()
        }


def open_folder(storage: Storage, folder: str) -> OpenCheckpoint:
    """The checkpoint in `folder` of `storage` ("" for `storage` itself), its manifest checked against its COMMIT."""
    text = read_sealed(storage, folder)
    return OpenCheckpoint(storage, folder, decode(text, join(storage.root, join(folder, MANIFEST))))


def open_save(storage: Storage, checkpoint: str) -> OpenCheckpoint:
    return open_folder(storage, newest_save(storage, checkpoint))


def open_checkpoint(path: str | os.PathLike[str]) -> OpenCheckpoint:
    """Open the newest committed save of the checkpoint at a path or URL; CheckpointError if there is none."""
    try:
        return open_save(*open_parent(path))
    except OSError as error:
        raise CheckpointError(f"{os.fspath(path)}: cannot be read ({error})") from error


def source_file(storage: Storage, name: str) -> SourceFile:
    """A file of another program. Links are followed, as caches of downloads consist of them."""
    if isinstance(storage, LocalStorage):
        path = Path(storage.root, name).resolve()
        storage, name = LocalStorage(path.parent), path.name
    size = storage.size(name)
    if size is None:
        raise CheckpointError(f"{storage.root}/{name}: there is no such file")
    return SourceFile(storage, name, size)


# A run that loads a checkpoint and saves continues its line, or begins a new line if that line has later checkpoints.


@dataclass(frozen=True)
class SaveRecord:
    """A checkpoint's position among others: its folder, when and at which step it was saved, and its lineage."""

    folder: str
    written: str
    step: int
    lineage: Lineage

    @property
    def position(self) -> tuple[str, int]:
        """The key of the order in a folder. It does not depend on clocks: see `SaveLine.next_record`."""
        return self.written, self.step

    def leads_to(self, tip: SaveRecord) -> bool:
        """Whether `tip` is this checkpoint, or was continued from it."""
        marks = ((tip.lineage.line, *tip.position), *tip.lineage.forks)
        return any(self.lineage.line == line and self.position <= tuple(position) for line, *position in marks)


def list_saves(storage: Storage) -> tuple[list[SaveRecord], list[str]]:
    """Checkpoints named by steps that have a COMMIT, unverified, in order; and other folders with such names."""
    records = {folder: read_record(storage, folder) for folder in storage.list() if step_of(folder) is not None}
    saves = sorted(filter(None, records.values()), key=lambda r: (r.position, save_number(r.folder), r.folder))
    return saves, [folder for folder, record in records.items() if record is None]


def read_record(storage: Storage, folder: str) -> SaveRecord | None:
    """The position of the checkpoint in `folder`, unverified; None without a COMMIT."""
    try:
        if not re.fullmatch(rb"[0-9a-f]{64}\n", storage.head(join(folder, COMMIT), SEAL + 1)):
            return None  # power failed while it was written
        head = decode_head(storage.head(join(folder, MANIFEST), HEAD))
        if head is None:
            manifest = open_folder(storage, folder).manifest
            head = manifest.written, manifest.step, manifest.lineage
    except (CheckpointError, FileNotFoundError, NotADirectoryError):
        return None
    return SaveRecord(folder, *head)


def committed_saves(storage: Storage) -> list[SaveRecord]:
    """The last committed save of each checkpoint that is named by its step, oldest first."""
    by_checkpoint: dict[str, SaveRecord] = {}
    for record in list_saves(storage)[0]:
        if is_committed(storage, record.folder):
            by_checkpoint.pop(checkpoint_of(record.folder), None)
            by_checkpoint[checkpoint_of(record.folder)] = record
    return list(by_checkpoint.values())


class Newest(NamedTuple):
    """The checkpoint to continue from, or None; why newer ones are left out; whether one of these is damaged."""

    folder: str | None
    faults: list[str]
    is_damaged: bool


def find_newest(storage: Storage, excluded: Collection[str] = ()) -> Newest:
    saves, uncommitted = list_saves(storage)
    faults: list[str] = []

    def opens(folder: str) -> bool:
        try:
            open_folder(storage, folder)
        except CheckpointError as error:
            faults.append(str(error))
            return False
        return True

    line = [save.folder for save in reversed(saves) if save.folder not in excluded and save.leads_to(saves[-1])]
    newest = next(filter(opens, line), None)
    is_damaged = bool(faults)
    for folder in sorted(uncommitted, key=lambda name: (step_of(name), name), reverse=True):
        if (newest is None or (step_of(folder) or 0) > (step_of(newest) or 0)) and not opens(folder):
            is_damaged |= storage.size(join(folder, COMMIT)) is not None
    return Newest(newest, faults, is_damaged)


def damage_text(storage: Storage, folder: str) -> str:
    """The damage to a committed checkpoint, in words; "" if there is none. Reads all of it."""
    try:
        for file in open_folder(storage, folder).files.values():
            file.verify()
    except (OSError, CheckpointError) as error:
        return str(error)
    return ""


@dataclass(eq=False)
class SaveLine:
    """The line of saves that a run continues. Rank 0 decides."""

    _last: SaveRecord | None = None  # the checkpoint that the run loaded or saved last
    _loaded_from: Storage | None = None  # where `_last` is, if it was loaded
    _surveyed: set[str] = field(default_factory=set)  # folders in which this run has saved on its line

    def loaded(self, storage: Storage, folder: str, manifest: Manifest) -> None:
        self._last, self._loaded_from = SaveRecord(folder, manifest.written, manifest.step, manifest.lineage), storage
        self._surveyed.clear()  # what this run saved after it is on another line now

    def saved(self, storage: Storage, record: SaveRecord) -> None:
        self._last, self._loaded_from = record, None
        if step_of(record.folder) is not None:
            self._surveyed.add(os.path.realpath(storage.root))

    def next_record(self, storage: Storage, name: str, step: int) -> SaveRecord:
        """The record of the next save. It sorts after all existing ones, even if clocks disagree or were set back."""
        root = os.path.realpath(storage.root)
        saves = [] if root in self._surveyed else list_saves(storage)[0]
        last, lineage = self._last, Lineage(secrets.token_hex(4))
        if last is not None:
            parent = "".join(filter(str.isprintable, checkpoint_of(last.folder)))[:200]
            has_later_saves = any(
                save.lineage.line == last.lineage.line and save.position > last.position for save in saves
            )
            if self._loaded_from is None or (
                os.path.realpath(self._loaded_from.root) == root
                and step_of(last.folder) is not None
                and not has_later_saves
            ):
                lineage = Lineage(last.lineage.line, parent, last.lineage.forks)
            else:
                forks = (*last.lineage.forks, (last.lineage.line, *last.position))
                lineage = Lineage(lineage.line, parent, forks)
        all_saves = [*saves, last] if last else saves
        latest = max((save.written for save in all_saves), default="")
        written = datetime.now(UTC).isoformat(timespec="microseconds")
        if written <= latest:  # the clock was set back
            with suppress(ValueError, OverflowError):  # a time that easymp did not write
                next_moment = datetime.fromisoformat(latest) + timedelta(microseconds=1)
                written = next_moment.isoformat(timespec="microseconds")
        record = SaveRecord(name, written, step, lineage)
        abandoned = [save.folder for save in saves if not save.leads_to(record)]
        if abandoned and step_of(name) is not None:
            logger.warning(
                "%s: a new line of checkpoints begins %s, and resume() goes on with it from now on. Not on it, and "
                "kept: %s",
                storage.root,
                f"at {lineage.parent}" if lineage.parent else "without resume()",
                join_some(abandoned, ", "),
            )
        return record


# Commits.


def check_name(checkpoint: str) -> None:
    reserved = checkpoint.startswith(TEMPORARY) or checkpoint_of(checkpoint) != checkpoint
    if "/" in checkpoint or not checkpoint or reserved:
        raise CheckpointError(
            f"{checkpoint!r} is not a name for a checkpoint: {TEMPORARY}… and ….save-2 are saves under way; "
            "pass another one"
        )


class Commit:
    """One save's `folder`, on the rank that holds the lock. A checkpoint of its name on another line is renamed."""

    def __init__(self, target: Storage, checkpoint: str, record: SaveRecord) -> None:
        self.record = record
        self._storage, self._checkpoint, self._keep_folder = target, checkpoint, False
        if target.renames:
            self.folder = temporary_name(checkpoint)
        else:
            self.folder = next_save(target.list(), checkpoint)
        self._lock = acquire(target, checkpoint, "" if target.renames else self.folder)
        try:
            names = target.list()
            owners = {owner for name in names if (owner := owner_of(name)) is not None}
            if saves_of(names, checkpoint) or leftovers_of(names, checkpoint):
                clean_up(target, checkpoint, self._lock.previous)
                refuse_foreign(target, checkpoint)
                move_other_line(target, checkpoint, record)
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
            save = next_save(target.list(), checkpoint)
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
    names = target.list()
    saves, leftovers = saves_of(names, checkpoint), leftovers_of(names, checkpoint)
    newest = next((save for save in saves if is_committed(target, save)), None)
    outdated = [save for save in saves if save not in (newest, checkpoint)]
    if checkpoint in saves and newest != checkpoint:
        is_foreign = target.renames and (content := target.list(checkpoint)) and not is_checkpoint(content)
        if dead_owner.get("folder") == checkpoint or (newest is not None and not is_foreign):
            outdated.append(checkpoint)
    if outdated or leftovers:
        target.sync()  # a writer may have died just after its rename: what it replaced goes when that is on disk
    for save in outdated:
        drop(target, save)
    for name in leftovers:
        remove_leftover(target, name)
    if target.renames and newest is not None and (checkpoint in outdated or checkpoint not in saves):
        target.rename(newest, checkpoint)
        target.sync()


def move_other_line(target: Storage, checkpoint: str, record: SaveRecord) -> None:
    """Rename an existing checkpoint of another line that has the name of the new save."""
    if step_of(checkpoint) is None:
        return
    existing = read_record(target, newest_save(target, checkpoint))
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
    if content and not is_checkpoint(content):
        raise CheckpointError(
            f"{join(target.root, name)} is there and is not a checkpoint ({join_some(content, ', ')}): it would be "
            "replaced, so pass another name"
        )


def retain(target: Storage, record: SaveRecord, limit: int | None) -> None:
    """Write the hint `latest`; of checkpoints before `record` keep only the last `limit`. Errors are logged."""
    if step_of(record.folder) is None:
        return
    try:
        hint = newest_save(target, record.folder).encode() + b"\n"
        target.replace(LATEST, [hint], len(hint))
        if limit is None:
            return
        saves = committed_saves(target)
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
    return [save for save in saves_of(target.list(), checkpoint) if is_committed(target, save)]


def drop(target: Storage, folder: str) -> None:
    """Remove a checkpoint that the caller has locked. Its COMMIT is removed first."""
    if target.renames:
        temporary = temporary_name(checkpoint_of(folder))
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
