"""How a folder becomes a checkpoint, and the one that it replaces goes: at no instant is there neither.

Where folders can be renamed (`renaming`), it is written under a temporary name, and the last step gives it its own. Where they cannot
(`staying`: object stores), files go to their place at once, and COMMIT, which is written last, decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ..errors import CheckpointError
from ..logging import get_logger
from .folders import checkpoint_of, inside, is_committed, next_save, saves_of, temporary, writing
from .lineage import Saved, drop, refuse_foreign, set_aside, take_away
from .lock import TEMPORARY, abandoned, lock_of
from .storage import Storage


class Commit(Protocol):
    """One save's folder, on the rank that claimed the checkpoint.

    Attributes:
        folder: where its files go.
    """

    folder: str

    def finish(self) -> None:
        """All files are there and COMMIT is: from now on it counts.

        Raises:
            OSError: it may not; what counted before still does.
        """
        ...

    def close(self) -> None:
        """Take away what was not finished, and let other writers have the checkpoint."""
        ...


def begin(storage: Storage, checkpoint: str, by: Saved | None = None) -> Commit:
    """Claim `checkpoint` of `storage`, clean up after writers that died, and make room for the new one.

    Args:
        by: the new one's place among others. One that has its name and is not on its line gets another name; without `by`, it is replaced.

    Raises:
        CheckpointError: another process writes it, or something else has its name.
        OSError: the folder cannot be written to.
    """
    return (Renaming if storage.renames else Staying)(storage, checkpoint, by)


def check_name(checkpoint: str) -> None:
    """Raises CheckpointError for a name that no checkpoint can have."""
    if (
        "/" in checkpoint
        or not checkpoint
        or checkpoint.startswith(TEMPORARY)
        or checkpoint_of(checkpoint) != checkpoint
    ):
        raise CheckpointError(
            f"{checkpoint!r} is no name for a checkpoint: {TEMPORARY}… and ….save-2 are those of saves under way; pass another one"
        )


# -- A checkpoint where folders can be renamed: written under a temporary name, it gets its own in one step.


logger = get_logger(__name__)


class Renaming:
    """As `commits.Commit` says."""

    def __init__(self, storage: Storage, checkpoint: str, by: Saved | None) -> None:
        self._storage, self._checkpoint = storage, checkpoint
        self._claim = storage.claim(checkpoint)
        self.folder = temporary(checkpoint)
        self._unsure = False
        try:
            refuse_foreign(storage, checkpoint)
            self._settle()
            set_aside(storage, checkpoint, by)
            self._clean()
            storage.make(self.folder)
        except BaseException:
            self._claim.release()
            raise

    def _settle(self) -> None:
        """End what a writer that died left half done where names cannot be swapped: one folder of this checkpoint, by its plain name."""
        storage = self._storage
        saves = saves_of(storage.list(), self._checkpoint)
        if saves in ([], [self._checkpoint]):
            return
        counts = next((save for save in saves if is_committed(storage, save)), self._checkpoint)
        for save in saves:
            if save != counts:
                drop(storage, save)
        if counts != self._checkpoint:
            storage.rename(counts, self._checkpoint)
            storage.sync()

    def _clean(self) -> None:
        """Take away what dead writers left under temporary names."""
        storage = self._storage
        left = [name for name in storage.list() if writing(name) and name != lock_of(self._checkpoint)]
        if left:
            storage.sync()  # one may have died just after a swap: what it replaced is given up only when that is on disk
        for owner in dict.fromkeys(map(writing, left)):
            assert owner is not None
            try:
                claim = storage.claim(owner) if owner != self._checkpoint else None
            except CheckpointError:
                continue  # it lives
            for name in left:
                if writing(name) == owner and name != lock_of(owner):
                    take_away(storage, name)
            if claim is not None:
                claim.release()

    def finish(self) -> None:
        storage, name = self._storage, self._checkpoint
        there = storage.list()
        if name not in there:
            storage.rename(self.folder, name)
            storage.sync()
            return
        if storage.exchange(self.folder, name):
            try:
                storage.sync()
            except OSError:
                # On the disk it may be either way now, so both folders stay. The next save cleans up once it has synced.
                self._unsure = True
                storage.exchange(self.folder, name)
                raise
            take_away(storage, self.folder)
            return
        second = next_save(there, name)
        storage.rename(self.folder, second)
        try:
            storage.sync()
        except OSError:
            self._unsure = True
            storage.rename(second, self.folder)
            raise
        try:  # it counts now; what is left to do is tidying, which the next save does if this one cannot
            drop(storage, name)
            storage.rename(second, name)
            storage.sync()
        except OSError as error:
            logger.warning("%s is %s for now: %s", inside(storage.place, name), second, error)

    def close(self) -> None:
        if not self._unsure:
            take_away(self._storage, self.folder)
        self._claim.release()


# -- A checkpoint where nothing can be renamed: files go to their place at once, and COMMIT, which is written last, decides.


class Staying:
    """As `commits.Commit` says."""

    def __init__(self, storage: Storage, checkpoint: str, by: Saved | None) -> None:
        self._storage, self._checkpoint = storage, checkpoint
        self.folder = next_save(storage.list(), checkpoint)
        self._claim = storage.claim(checkpoint, self.folder)
        self._finished = False
        try:
            _settle(storage, checkpoint, self._claim.left)
            if storage.list(self.folder):
                raise CheckpointError(
                    f"{inside(storage.place, checkpoint)}: another writer was there just now: give this run its own"
                )
            refuse_foreign(storage, checkpoint)
            set_aside(storage, checkpoint, by)
            for name in storage.list():
                owner = writing(name)
                if owner is not None and owner != checkpoint and abandoned(storage, name):
                    claim = storage.claim(owner)
                    _settle(storage, owner, claim.left)
                    claim.release()
            storage.make(self.folder)
        except BaseException:
            self._claim.release()
            raise

    def finish(self) -> None:
        self._storage.sync()
        self._finished = True
        for save in saves_of(self._storage.list(), self._checkpoint):
            if save != self.folder:
                take_away(self._storage, save)

    def close(self) -> None:
        if not self._finished:
            take_away(self._storage, self.folder)
        self._claim.release()


def _settle(storage: Storage, checkpoint: str, left: Mapping[str, Any]) -> None:
    """Take away what a writer that died left of this checkpoint, beside the save that counts; `left` are its words."""
    saves = saves_of(storage.list(), checkpoint)
    counts = next((save for save in saves if is_committed(storage, save)), None)
    for save in saves:
        ours = counts is not None or save != checkpoint or save == left.get("folder")
        if save != counts and ours:
            take_away(storage, save)
