"""How checkpoints go: what counts stops counting before its first file goes, and only once a newer one is on disk."""

from __future__ import annotations

from ..errors import CheckpointError
from ..log import get_logger
from . import claims
from .committed import inside, is_committed
from .folders import LATEST, checkpoint_of, committed_steps, saves_of, temporary
from .manifest import COMMIT, MANIFEST
from .storage import Storage

logger = get_logger(__name__)


def retain(storage: Storage, checkpoint: str, limit: int | None) -> None:
    """After `checkpoint` is committed: the hint `latest`, and only `limit` of the others that are named by steps stay, the newest.

    What has no COMMIT, or another name, is not touched. Trouble here is not the new checkpoint's, so it goes to the log.
    """
    try:
        steps = [folder for _, folder in committed_steps(storage)]
        others = [folder for folder in steps if checkpoint_of(folder) != checkpoint]
        gone = others[limit:] if limit is not None else []
        if len(others) < len(steps):
            newest = next(folder for folder in steps if folder not in gone)
            storage.replace(LATEST, newest.encode() + b"\n")
        for folder in gone:
            _retire(storage, folder)
    except (OSError, CheckpointError) as error:
        logger.warning("%s: older checkpoints stay, as they could not be removed: %s", storage.place, error)


def _retire(storage: Storage, folder: str) -> None:
    checkpoint = checkpoint_of(folder)
    try:
        claim = storage.claim(checkpoint, claims.words(folder=folder))  # so that who comes after knows what was left half done
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
        logger.warning("%s counts no longer, and could not be removed: %s", inside(storage.place, folder), error)


def refuse_foreign(storage: Storage, name: str) -> None:
    """Raises CheckpointError where `name` is there and no checkpoint, not even half of one: it would be lost."""
    there = [name] if storage.size(name) is not None else storage.list(name)
    if there and MANIFEST not in there and COMMIT not in there:
        raise CheckpointError(
            f"{inside(storage.place, name)} is there and no checkpoint ({', '.join(there[:5])}{' …' if len(there) > 5 else ''}): "
            "it would be replaced, so pass another name"
        )
