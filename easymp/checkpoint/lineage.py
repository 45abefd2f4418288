"""The lines that checkpoints form, the last checkpoint of a line, and the removal of older ones.

A run that loads a checkpoint and saves continues its line, or begins one of its own if that line has later checkpoints. Checkpoints are
ordered by their saves, never by the number of the step.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from ..errors import CheckpointError
from ..logging import get_logger
from .folders import (
    LATEST,
    SEAL,
    Opened,
    aside,
    checkpoint_of,
    current,
    inside,
    is_committed,
    open_manifest,
    save_of,
    saves_of,
    step_of,
    temporary,
)
from .lock import claim
from .manifest import COMMIT, MANIFEST, Lineage, Manifest, head
from .storage import Storage

logger = get_logger(__name__)
HEAD = 2**16  # bytes of a manifest in which its plan usually ends
FEW = 5  # names in a sentence before the rest is counted


# -- order -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """A checkpoint's position among others: its folder, when and at which step it was saved, and its lineage."""

    folder: str
    written: str
    step: int
    lineage: Lineage

    @property
    def position(self) -> tuple[str, int]:
        """The key of the order in a folder. It does not depend on clocks: see `Line.next`."""
        return self.written, self.step

    def leads_to(self, tip: Saved) -> bool:
        """Whether `tip` is this checkpoint, or was continued from it."""
        marks = ((tip.lineage.line, *tip.position), *tip.lineage.forks)
        return any(self.lineage.line == line and self.position <= tuple(at) for line, *at in marks)


def survey(storage: Storage) -> tuple[list[Saved], list[str]]:
    """Checkpoints named by steps that have a COMMIT, unverified, in the order of their saves; and other folders with such names."""
    found = {folder: _saved(storage, folder) for folder in storage.list() if step_of(folder) is not None}
    saved = sorted(filter(None, found.values()), key=lambda it: (it.position, save_of(it.folder), it.folder))
    return saved, [folder for folder, it in found.items() if it is None]


def _saved(storage: Storage, folder: str) -> Saved | None:
    try:
        if not re.fullmatch(rb"[0-9a-f]{64}\n", storage.head(inside(folder, COMMIT), SEAL + 1)):
            return None  # power failed while it was written
        there = head(storage.head(inside(folder, MANIFEST), HEAD))
        if there is None:
            manifest = open_manifest(storage, folder)
            there = manifest.written, manifest.step, manifest.lineage
    except (CheckpointError, FileNotFoundError, NotADirectoryError):
        return None
    return Saved(folder, *there)


def committed(storage: Storage) -> list[Saved]:
    """Committed checkpoints named by steps, in the order of their saves; the last save of each."""
    counts: dict[str, Saved] = {}
    for it in survey(storage)[0]:
        if is_committed(storage, it.folder):
            counts.pop(checkpoint_of(it.folder), None)
            counts[checkpoint_of(it.folder)] = it
    return list(counts.values())


def newest(storage: Storage, passed: Collection[str] = ()) -> tuple[str | None, list[str], bool]:
    """Find the checkpoint to continue from: the last save, or its parent if that save is damaged.

    Returns its folder or None; sentences about newer folders that are left out, unless they are in `passed`; whether one is damaged.
    """
    found, others = survey(storage)
    said: list[str] = []

    def opens(folder: str) -> bool:
        try:
            open_manifest(storage, folder)
        except CheckpointError as error:
            said.append(str(error))
            return False
        return True

    line = [it.folder for it in reversed(found) if it.folder not in passed and it.leads_to(found[-1])]
    chosen = next(filter(opens, line), None)
    damaged = bool(said)
    for folder in sorted(others, key=lambda name: (step_of(name), name), reverse=True):
        if (chosen is None or (step_of(folder) or 0) > (step_of(chosen) or 0)) and not opens(folder):
            damaged |= storage.size(inside(folder, COMMIT)) is not None
    return chosen, said, damaged


def damage(storage: Storage, folder: str) -> str:
    """The damage to a committed checkpoint, in words; "" if there is none. Reads all of it."""
    try:
        opened = Opened(storage, folder, open_manifest(storage, folder))
        for file in (*opened.files.values(), *opened.extra.values()):
            file.verify()
    except (OSError, CheckpointError) as error:
        return str(error)
    return ""


# -- the line of a run -------------------------------------------------------------------------------------------------


class Line:
    """The line of saves that a run continues. Rank 0 decides."""

    def __init__(self) -> None:
        self.last: Saved | None = None  # the checkpoint that the run loaded or saved last
        self._loaded: Storage | None = None  # the storage of `last`, if it was loaded
        self._surveyed: set[str] = set()

    def loaded(self, storage: Storage, folder: str, manifest: Manifest) -> None:
        """The run continues from this checkpoint."""
        self.last, self._loaded = Saved(folder, manifest.written, manifest.step, manifest.lineage), storage
        self._surveyed.clear()  # what this run saved after it is on another line now

    def begin_anew(self) -> None:
        """The run continues from a checkpoint that easymp did not write."""
        self.last = self._loaded = None
        self._surveyed.clear()

    def next(self, storage: Storage, name: str, step: int) -> Saved:
        """Lineage of the next save. It sorts after all existing ones, even if clocks disagree or were set back."""
        there = [] if _real(storage) in self._surveyed else survey(storage)[0]
        last, parent, forks, line = self.last, "", (), secrets.token_hex(4)
        if last is not None:
            parent = "".join(filter(str.isprintable, checkpoint_of(last.folder)))[:200]
            forks = last.lineage.forks
            if self._continues(last, storage, there):
                line = last.lineage.line
            else:
                forks = (*forks, (last.lineage.line, *last.position))
        after = max((it.written for it in [*there, *([last] if last else [])]), default="")
        it = Saved(name, _later(after), step, Lineage(line, parent, forks))
        left = [other.folder for other in there if not other.leads_to(it)]
        if left and step_of(name) is not None:
            logger.warning(
                "%s: a new line of checkpoints begins %s, and resume() goes on with it from now on. Not on it, and kept: %s",
                storage.place,
                f"at {parent}" if parent else "without resume()",
                ", ".join(left[:FEW]) + (f" and {len(left) - FEW} more" if len(left) > FEW else ""),
            )
        return it

    def _continues(self, last: Saved, storage: Storage, there: Sequence[Saved]) -> bool:
        """Whether the next save continues the line of the last one; False if that line has later saves."""
        return self._loaded is None or (
            _real(self._loaded) == _real(storage)
            and step_of(last.folder) is not None
            and not any(it.lineage.line == last.lineage.line and it.position > last.position for it in there)
        )

    def saved(self, storage: Storage, it: Saved) -> None:
        """Note that `it`, a result of `next`, is committed."""
        self.last, self._loaded = it, None
        if step_of(it.folder) is not None:
            self._surveyed.add(_real(storage))


def _real(storage: Storage) -> str:
    return os.path.realpath(storage.place)


def _later(than: str) -> str:
    """The time now, or one microsecond after `than` if the clock is behind it; ISO 8601."""
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    if now > than:
        return now
    try:
        return (datetime.fromisoformat(than) + timedelta(microseconds=1)).isoformat(timespec="microseconds")
    except (ValueError, OverflowError):  # a time that easymp did not write
        return now


# -- removal: a checkpoint stops counting before its first file goes, and only once a newer one is on disk -------------


def retain(storage: Storage, it: Saved, limit: int | None) -> None:
    """After `it` is committed: write the hint `latest`, and keep only the last `limit` of the others on its line.

    Folders without COMMIT, with other names, or on other lines are not touched. Errors are logged.
    """
    if step_of(it.folder) is None:
        return
    try:
        storage.replace(LATEST, current(storage, it.folder).encode() + b"\n")
        if limit is None:
            return
        there = committed(storage)
        others = [other for other in there if checkpoint_of(other.folder) != it.folder and other.leads_to(it)]
        gone = others[: max(0, len(others) - limit)]
        stay = {other.lineage.line for other in there if other not in gone}
        for other in gone:
            if other.lineage.line not in stay:
                stay.add(other.lineage.line)
                words = "%s is removed, as total_limit says: it was the last checkpoint of line %s"
                logger.warning(words, other.folder, other.lineage.line)
            _retire(storage, checkpoint_of(other.folder), other.folder)
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
    return [save for save in reversed(saves_of(storage.list(), checkpoint)) if is_committed(storage, save)]


def drop(storage: Storage, folder: str) -> None:
    """Remove a checkpoint that the caller has locked. Its COMMIT is removed first."""
    if storage.renames:
        gone = temporary(checkpoint_of(folder))
        storage.rename(folder, gone)
        storage.sync()
        folder = gone
    take_away(storage, folder)


def take_away(storage: Storage, folder: str) -> None:
    """Remove an uncommitted leftover. Failures are logged and ignored."""
    try:
        storage.remove(folder)
    except OSError as error:
        place = inside(storage.place, folder)
        logger.warning("%s counts no longer, and could not be removed: %s", place, error)


def set_aside(storage: Storage, checkpoint: str, by: Saved | None) -> None:
    """Rename an existing checkpoint of another line that has the name of the new save `by`."""
    if by is None or step_of(checkpoint) is None:
        return
    there = _saved(storage, current(storage, checkpoint))
    if there is None or there.leads_to(by):
        return
    named = [name for name in storage.list() if storage.size(inside(name, COMMIT)) is not None]
    name = aside(named, checkpoint, there.lineage.line)
    storage.remove(name)  # half of a copy, of a run that was killed
    storage.move(there.folder, name)
    place = inside(storage.place, checkpoint)
    logger.warning("%s is of another line of checkpoints, and is named %s from now on", place, name)


def refuse_foreign(storage: Storage, name: str) -> None:
    """Raise CheckpointError if `name` exists and is not a checkpoint, since a save would overwrite it."""
    there = [name] if storage.size(name) is not None else storage.list(name)
    if there and MANIFEST not in there and COMMIT not in there:
        found = ", ".join(there[:5]) + (" …" if len(there) > 5 else "")
        raise CheckpointError(
            f"{inside(storage.place, name)} is there and is not a checkpoint ({found}): it would be replaced, so pass another name"
        )
