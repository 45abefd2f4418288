"""Loading: all is checked and read before anything live changes, and all ranks go on, or none.

In this order: what is there is compared with what is live; all is read, and verified; what runs a user's code and so may fail is tried,
and undone where it does; then tensors are filled, which does not fail. After each step the ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import CheckpointError, EasympError
from ..log import get_logger
from ..world import World
from .committed import open_manifest
from .folders import current
from .manifest import Manifest
from .snapshot import Kept, Reading, Trial
from .storage import Storage, Tick

logger = get_logger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that is in place.

    Attributes:
        place: where it lies.
        manifest: what it holds.
        skipped: what did not fit, in words; only ``strict=False`` skips anything.
    """

    place: str
    manifest: Manifest
    skipped: tuple[str, ...] = ()


def load(
    world: World, storage: Storage, name: str, kept: Sequence[Kept], strict: bool = True, tick: Tick = lambda n: None
) -> Loaded:
    """Put the checkpoint `name` of `storage` into what is live, on all ranks together.

    Raises:
        CheckpointError: on every rank, if it does not fit or cannot be read on one; nothing live has changed.
    """
    place = f"{storage.place}/{name}"
    puts: list[Callable[[], None]] = []
    found: list[Reading] = []

    def prepare() -> None:
        folder = current(storage, name)
        reading = Reading(storage, folder, open_manifest(storage, folder), world.rank, strict)
        puts.extend(k.take(reading) for k in kept)
        if left := reading.left():
            reading.complain(f"nothing here takes {', '.join(left)} of the checkpoint")
        reading.run(tick)
        found.append(reading)

    _together(world, place, _trouble(prepare))
    (reading,) = found
    reading.skipped += _attempt(world, place, reading.trials, strict)
    world.settle()  # whatever waits to be averaged is about to be replaced
    for put in puts:
        put()
    skipped = tuple(dict.fromkeys(words for everyones in world.gather_objects(reading.skipped) for words in everyones))
    if skipped:
        logger.warning("%s: skipped: %s", place, "; ".join(skipped))
    return Loaded(place, reading.manifest, skipped)


def _attempt(world: World, place: str, trials: Sequence[Trial], strict: bool) -> list[str]:
    """Make all trials, or none; those that failed on any rank are left out where that is allowed, and returned in words."""
    mine = {trial.what: words for trial in trials if (words := _trouble(trial.change))}
    everyones = world.gather_objects(mine)
    failed = {what: words for each in reversed(everyones) for what, words in each.items()}
    if not failed:
        return []
    stuck = [
        f"{trial.what} could not be put back: {words}"
        for trial in reversed(trials)
        if (strict or trial.what in failed) and (words := _trouble(trial.undo))
    ]
    if strict or any(world.gather_objects(stuck)):
        _together(world, place, "; ".join([f"{what}: {words}" for what, words in mine.items()] + stuck))
    return [f"{what}: {words}" for what, words in failed.items()]


def _trouble(act: Callable[[], object]) -> str:
    """What went wrong in `act`, in words; "" where nothing did. Whatever it was, the other ranks wait to hear of it."""
    try:
        act()
    except (OSError, EasympError) as error:
        return str(error) or type(error).__name__
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _together(world: World, place: str, said: str) -> None:
    """Raise on all ranks what went wrong on any."""
    everyones = world.gather_objects(said)
    by_words: dict[str, list[str]] = {}
    for rank, words in enumerate(everyones):
        if words:
            by_words.setdefault(words, []).append(str(rank))
    if by_words:
        who = {words: f"rank {', '.join(ranks)}: " if len(ranks) < world.size else "" for words, ranks in by_words.items()}
        told = "; ".join(who[words] + words for words in by_words)
        changed = "" if "could not be put back" in told else ", and nothing has changed"
        raise CheckpointError(f"{place} was not loaded{changed}: {told}")
