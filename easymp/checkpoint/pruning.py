"""Older checkpoints removed by hand: those saved last stay, and so does everything that may have an owner."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError, SettingError
from . import claims
from .catalog import bytes_in
from .committed import is_committed
from .folders import checkpoint_of, lock_of, saves_of, writing
from .retention import committed, drop, take_away
from .storage import Storage
from .storages import open_storage


@dataclass(frozen=True)
class Pruned:
    """Folders: checkpoints that stay, those that go, what dead writers left and goes too, and what somebody is writing just now.

    Attributes:
        size: bytes in what goes.
    """

    kept: tuple[str, ...]
    removed: tuple[str, ...]
    left_over: tuple[str, ...]
    busy: tuple[str, ...]
    size: int


def prune(root: str | os.PathLike[str], keep: int, dry_run: bool = False, abandoned: bool = False) -> Pruned:
    """Remove committed checkpoints below the folder or URL `root`, and what dead writers left.

    Of the line that `resume` goes on with, the `keep` that were saved last stay; of each other line, the last one. Checkpoints that are not
    named by a step stay, and so does a folder without COMMIT, unless its writer is known to be dead.

    Args:
        keep: at least 1.
        abandoned: remove the last checkpoints of other lines, too.
        dry_run: say what would go, and remove nothing.

    Raises:
        SettingError: `keep` is not at least 1.
        OSError: `root` cannot be read or written.
    """
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise SettingError(
            f"keep={keep!r}: at least 1 checkpoint must stay; remove the folder itself if none shall"
        )
    storage = open_storage(os.fspath(root))
    there = committed(storage)
    line = [it for it in there if it.leads_to(there[-1])]
    ends = {} if abandoned else {it.lineage.line: it for it in there if it not in line}
    kept = [it.folder for it in reversed(there) if it in line[-keep:] or it in ends.values()]
    old: dict[str, list[str]] = {}
    for folder in (it.folder for it in there if it.folder not in kept):
        # The newest save of a step last, or an older one would count for a moment.
        saves = reversed(saves_of(storage.list(), checkpoint_of(folder)))
        old[checkpoint_of(folder)] = [save for save in saves if is_committed(storage, save)]
    owners = dict.fromkeys(owner for name in storage.list() if (owner := writing(name)) is not None)
    removed, left_over, busy, size = [], [], [], 0
    storage.sync()  # a writer may have died just after a swap: what it replaced goes once that is on disk
    for checkpoint in dict.fromkeys([*old, *owners]):
        gone = old.get(checkpoint, [])
        try:
            # Named in the claim, so that who comes after a kill knows what was left half done.
            claim = storage.claim(checkpoint, claims.words(**({"folder": gone[-1]} if gone else {})))
        except CheckpointError:
            busy.append(checkpoint)
            continue
        try:
            rest = _left(storage, checkpoint, claim.left)
            size += sum(bytes_in(storage, name) for name in (*gone, *rest))
            for folder in () if dry_run else rest:
                take_away(storage, folder)
            for folder in () if dry_run else gone:
                drop(storage, folder)
        finally:
            claim.release()
        removed += gone
        left_over += rest
    return Pruned(tuple(kept), tuple(removed), tuple(left_over), tuple(busy), size)


def _left(storage: Storage, checkpoint: str, words: Mapping[str, Any]) -> list[str]:
    """What a dead writer of `checkpoint` left: temporary folders, and the one that its claim names."""
    there = storage.list()
    left = [name for name in there if writing(name) == checkpoint and name != lock_of(checkpoint)]
    named = words.get("folder")
    if named in there and checkpoint_of(str(named)) == checkpoint and not is_committed(storage, str(named)):
        left.append(str(named))
    return left
