"""Commit a folder as a checkpoint and remove the one that it replaces. One of the two exists at every instant.

The order of a save: claim, folder → every file written and fsynced → manifest → folder fsynced → COMMIT → folder fsynced → renamed → parent
folder fsynced → only then removals. Where folders can be renamed (`Renamed`), a checkpoint is written under a temporary name, and the last
step gives it its own, or swaps it with the one that it replaces. Elsewhere (`InPlace`: object stores) each save has a folder of its own,
and COMMIT, which is written last, decides which counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError
from ..logging import get_logger
from .folders import TEMPORARY, checkpoint_of, inside, is_committed, next_save, saves_of, temporary, writing
from .lineage import Saved, drop, refuse_foreign, set_aside, take_away
from .lock import abandoned, claim, lock_of
from .storage import Storage

logger = get_logger(__name__)


def begin(storage: Storage, checkpoint: str, by: Saved | None = None) -> Commit:
    """Lock `checkpoint` of `storage`, clean up after dead writers, and make the folder of the new save.

    Args:
        by: lineage of the new save. An existing checkpoint of this name on another line is renamed; without `by`, it is replaced.

    Raises:
        CheckpointError: another process writes it, or its name is taken by other files.
        OSError: the folder cannot be written to.
    """
    if storage.renames:
        return Renamed(storage, checkpoint, temporary(checkpoint), by)
    return InPlace(storage, checkpoint, next_save(storage.list(), checkpoint), by)


def check_name(checkpoint: str) -> None:
    """Raises CheckpointError for a name that a checkpoint cannot have."""
    reserved = checkpoint.startswith(TEMPORARY) or checkpoint_of(checkpoint) != checkpoint
    if "/" in checkpoint or not checkpoint or reserved:
        said = f"{checkpoint!r} is not a name for a checkpoint"
        raise CheckpointError(
            f"{said}: {TEMPORARY}… and ….save-2 are those of saves under way; pass another one"
        )


class Commit(ABC):
    """One save's folder, on the rank that claimed the checkpoint.

    Attributes:
        folder: where its files go.
    """

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
        saves = saves_of(storage.list(), checkpoint)
        if saves not in ([], [checkpoint]):  # where names cannot be swapped, a dead writer may have left two
            counts = next((save for save in saves if is_committed(storage, save)), checkpoint)
            for save in saves:
                if save != counts:
                    drop(storage, save)
            if counts != checkpoint:
                storage.rename(counts, checkpoint)
                storage.sync()
        set_aside(storage, checkpoint, by)
        left: dict[str, list[str]] = {}
        for name in storage.list():
            if (owner := writing(name)) and name != lock_of(checkpoint):
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
            self._finish_beside(next_save(there, name))

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
            logger.warning("%s is %s for now: %s", inside(storage.place, name), second, error)


class InPlace(Commit):
    """Commit by a file that is written last."""

    def _settle(self, by: Saved | None) -> None:
        storage, checkpoint = self._storage, self._checkpoint
        _remove_uncommitted(storage, checkpoint, self._claim.left)
        if storage.list(self.folder):
            place = inside(storage.place, checkpoint)
            raise CheckpointError(
                f"{place}: another writer was there just now: give this run a folder of its own"
            )
        refuse_foreign(storage, checkpoint)
        set_aside(storage, checkpoint, by)
        for name in storage.list():
            owner = writing(name)
            if owner is not None and owner != checkpoint and abandoned(storage, name):
                lock = claim(storage, owner)
                _remove_uncommitted(storage, owner, lock.left)
                lock.release()

    def finish(self) -> None:
        self._storage.sync()
        self._keep = True
        for save in saves_of(self._storage.list(), self._checkpoint):
            if save != self.folder:
                take_away(self._storage, save)


def _remove_uncommitted(storage: Storage, checkpoint: str, left: Mapping[str, Any]) -> None:
    """Remove a dead writer's files of this checkpoint; `left` is the lock's content, which names its folder."""
    saves = saves_of(storage.list(), checkpoint)
    counts = next((save for save in saves if is_committed(storage, save)), None)
    for save in saves:
        ours = counts is not None or save != checkpoint or save == left.get("folder")
        if save != counts and ours:
            take_away(storage, save)
