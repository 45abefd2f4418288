"""A checkpoint where folders can be renamed: written under a temporary name, it gets its own in one step.

That step swaps it with the one that it replaces. Where a file system cannot swap, a second name counts until the first one is free (see
`folders`), so at no instant is there neither.
"""

from __future__ import annotations

from ..errors import CheckpointError
from ..logging import get_logger
from . import claims
from .committed import inside, is_committed
from .folders import lock_of, next_save, saves_of, temporary, writing
from .lineage import Saved, drop, refuse_foreign, set_aside, take_away
from .storage import Storage

logger = get_logger(__name__)


class Renaming:
    """As `commits.Commit` says."""

    def __init__(self, storage: Storage, checkpoint: str, by: Saved | None) -> None:
        self._storage, self._checkpoint = storage, checkpoint
        self._claim = storage.claim(checkpoint, claims.words())
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
                claim = storage.claim(owner, claims.words()) if owner != self._checkpoint else None
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
