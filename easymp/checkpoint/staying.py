"""A checkpoint where nothing can be renamed: files go to their place at once, and COMMIT, which is written last, decides.

Each save of a checkpoint has a folder of its own, as the one before must be whole until this one is. The words of the claim name that
folder, so who comes after a writer that died knows what it left.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError
from . import claims
from .committed import inside, is_committed
from .folders import checkpoint_of, next_save, saves_of, writing
from .markers import LONG_AGO
from .retention import take_away
from .storage import Storage


class Staying:
    """As `commits.Commit` says."""

    def __init__(self, storage: Storage, checkpoint: str) -> None:
        self._storage, self._checkpoint = storage, checkpoint
        self.folder = next_save(storage.list(), checkpoint)
        self._claim = storage.claim(checkpoint, claims.words(folder=self.folder))
        self._finished = False
        try:
            _clean_after(storage, checkpoint, self._claim.left)
            if storage.list(self.folder):
                raise CheckpointError(
                    f"{inside(storage.place, checkpoint)}: another writer was there just now: give this run its own"
                )
            for name in storage.list():
                owner = writing(name)
                if owner is not None and owner != checkpoint and _is_old(storage, name):
                    claim = storage.claim(owner, claims.words())
                    _clean_after(storage, owner, claim.left)
                    claim.release()
            storage.make(self.folder)
        except BaseException:
            self._claim.release()
            raise

    def finish(self) -> None:
        self._finished = True
        for save in saves_of(self._storage.list(), self._checkpoint):
            if save != self.folder and is_committed(self._storage, save):
                take_away(self._storage, save)

    def close(self) -> None:
        if not self._finished:
            take_away(self._storage, self.folder)
        self._claim.release()


def _clean_after(storage: Storage, checkpoint: str, left: Mapping[str, Any]) -> None:
    folder = left.get("folder")
    if isinstance(folder, str) and checkpoint_of(folder) == checkpoint and not is_committed(storage, folder):
        take_away(storage, folder)


def _is_old(storage: Storage, name: str) -> bool:
    """Whether it is known without watching it for a while that nobody writes a marker any more."""
    try:
        return time.time() - storage.modified(name) > LONG_AGO
    except OSError:
        return False
