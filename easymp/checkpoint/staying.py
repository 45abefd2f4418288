"""A checkpoint where nothing can be renamed: files go to their place at once, and COMMIT, which is written last, decides.

Each save of a checkpoint has a folder of its own, as the one before must be whole until this one is. The words of the claim name that
folder, so who comes after a writer that died knows what it left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError
from . import claims
from .committed import inside, is_committed
from .folders import next_save, saves_of, writing
from .lineage import Saved, refuse_foreign, set_aside, take_away
from .markers import abandoned
from .storage import Storage


class Staying:
    """As `commits.Commit` says."""

    def __init__(self, storage: Storage, checkpoint: str, by: Saved | None) -> None:
        self._storage, self._checkpoint = storage, checkpoint
        self.folder = next_save(storage.list(), checkpoint)
        self._claim = storage.claim(checkpoint, claims.words(folder=self.folder))
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
                    claim = storage.claim(owner, claims.words())
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
