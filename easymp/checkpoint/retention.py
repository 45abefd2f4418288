"""How checkpoints go: what counts stops counting before its first file goes, and only once a newer one is on disk."""

from __future__ import annotations

from ..errors import CheckpointError
from ..logging import get_logger
from . import claims
from .committed import inside, is_committed
from .finding import Saved, place_of, survey
from .folders import LATEST, aside, checkpoint_of, current, saves_of, step_of, temporary
from .manifest import COMMIT, MANIFEST
from .storage import Storage

logger = get_logger(__name__)


def retain(storage: Storage, it: Saved, limit: int | None) -> None:
    """After `it` is committed: the hint `latest`, and only `limit` of the others on its line stay, those that were saved last.

    What has no COMMIT, is not named by a step, or is on another line, is not touched. Trouble here is not the new checkpoint's, so it goes
    to the log.
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
                logger.warning(
                    "%s is removed, as total_limit says: it was the last checkpoint of line %s",
                    other.folder,
                    other.lineage.line,
                )
                stay.add(other.lineage.line)
            _retire(storage, other.folder)
    except (OSError, CheckpointError) as error:
        logger.warning("%s: older checkpoints stay, as they could not be removed: %s", storage.place, error)


def committed(storage: Storage) -> list[Saved]:
    """Committed checkpoints that are named by steps, in the order in which they were saved; of several saves of one, the last."""
    counts: dict[str, Saved] = {}
    for it in survey(storage)[0]:
        if is_committed(storage, it.folder):
            counts.pop(checkpoint_of(it.folder), None)
            counts[checkpoint_of(it.folder)] = it
    return list(counts.values())


def set_aside(storage: Storage, checkpoint: str, by: Saved | None) -> None:
    """Give a checkpoint another name if it has that of `by`, which is about to be saved and is not continued from it."""
    if by is None or step_of(checkpoint) is None:
        return
    there = place_of(storage, current(storage, checkpoint))
    if there is None or there.leads_to(by):
        return
    named = [name for name in storage.list() if storage.size(inside(name, COMMIT)) is not None]
    name = aside(named, checkpoint, there.lineage.line)
    storage.remove(name)  # half of a copy, of a run that was killed
    storage.move(there.folder, name)
    logger.warning(
        "%s is of another line of checkpoints, and is named %s from now on",
        inside(storage.place, checkpoint),
        name,
    )


def _retire(storage: Storage, folder: str) -> None:
    checkpoint = checkpoint_of(folder)
    try:
        claim = storage.claim(
            checkpoint, claims.words(folder=folder)
        )  # so that who comes after knows what was left half done
    except CheckpointError:
        return  # somebody writes it just now
    try:
        # The newest save of a step last, or an older one would count for a moment.
        for save in reversed(saves_of(storage.list(), checkpoint)):
            if is_committed(storage, save):
                drop(storage, save)
    finally:
        claim.release()


def drop(storage: Storage, folder: str) -> None:
    """A checkpoint that is to go, of whoever claimed it: it is one no longer before its first file goes."""
    if storage.renames:
        gone = temporary(checkpoint_of(folder))
        storage.rename(folder, gone)
        storage.sync()
        folder = gone
    take_away(storage, folder)


def take_away(storage: Storage, folder: str) -> None:
    """Remove what counts for nothing; what cannot be removed is in nobody's way, and the log says so."""
    try:
        storage.remove(folder)
    except OSError as error:
        logger.warning(
            "%s counts no longer, and could not be removed: %s", inside(storage.place, folder), error
        )


def refuse_foreign(storage: Storage, name: str) -> None:
    """Raises CheckpointError where `name` is there and no checkpoint, not even half of one: it would be lost."""
    there = [name] if storage.size(name) is not None else storage.list(name)
    if there and MANIFEST not in there and COMMIT not in there:
        raise CheckpointError(
            f"{inside(storage.place, name)} is there and no checkpoint ({', '.join(there[:5])}{' …' if len(there) > 5 else ''}): "
            "it would be replaced, so pass another name"
        )
