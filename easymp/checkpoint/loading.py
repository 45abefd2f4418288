"""Loading: all is checked, read and verified before anything live changes, and all ranks go on, or none.

In this order: what is there is compared with what is live; all is read, and verified; what runs a user's code and so may fail is tried,
and undone where it does; then tensors are filled. After each step the ranks agree.

Of files in a local folder, live tensors are filled by reading once more, from files that are still open (the first `local.HELD` of
them). That fails where somebody writes into these very files meanwhile, or where the disk does. Live tensors are then in part the old
ones and in part the new ones, an error says so on all ranks, and another load puts all in place again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..distributed import World
from ..errors import CheckpointError, EasympError
from ..logging import get_logger
from .committed import open_manifest
from .fitting import several
from .folders import current
from .manifest import Manifest
from .snapshot import Kept, Reading, Trial
from .storage import Storage, Tick, nothing

logger = get_logger(__name__)

STUCK = "could not be put back"
HALF = (
    "was loaded in part, so that the live state is neither what it was nor what was saved: load this or another checkpoint before going "
    "on. The cause"
)


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
    world: World, storage: Storage, name: str, kept: Sequence[Kept], strict: bool = True, tick: Tick = nothing
) -> Loaded:
    """Put the checkpoint `name` of `storage` into what is live, on all ranks together.

    Raises:
        CheckpointError: on every rank, if it does not fit or cannot be read on one; nothing live has changed. Or a file that was whole
            could not be read a second time, and the message says that the state was loaded in part.
    """
    with storage.held() as again:

        def open_it() -> Reading:
            folder = current(storage, name)
            return Reading(storage, folder, open_manifest(storage, folder), world.rank, strict, again)

        return put_in_place(world, f"{storage.place}/{name}", open_it, kept, tick)


def put_in_place(
    world: World, place: str, open_it: Callable[[], Reading], kept: Sequence[Kept], tick: Tick = nothing
) -> Loaded:
    """As `load`, from what `open_it` opens at `place`."""
    puts: list[Callable[[], None]] = []
    found: list[Reading] = []

    def prepare() -> None:
        reading = open_it()
        puts.extend(_taken(k, reading) for k in kept)
        if left := reading.left():
            reading.complain(
                f"nothing here takes {several(left)} of the checkpoint: prepare what was saved before loading"
            )
        reading.run(tick)
        found.append(reading)

    trouble = _trouble(prepare)
    _together(world, place, _words(trouble), trouble)
    (reading,) = found
    reading.skipped += _attempt(world, place, reading.trials, reading.strict)
    world.settle()  # whatever waits to be averaged is about to be replaced

    def put_all() -> None:
        for put in puts:
            put()

    trouble = _trouble(put_all)
    _together(world, place, _words(trouble), trouble, HALF)
    skipped = tuple(
        dict.fromkeys(words for everyones in world.gather_objects(reading.skipped) for words in everyones)
    )
    if skipped:
        logger.warning("%s: skipped: %s", place, "; ".join(skipped))
    return Loaded(place, reading.manifest, skipped)


def _attempt(world: World, place: str, trials: Sequence[Trial], strict: bool) -> list[str]:
    """Make all trials, or none; those that failed on any rank are left out where that is allowed, and returned in words."""
    causes = {trial.what: error for trial in trials if (error := _trouble(trial.change)) is not None}
    mine = {what: _words(error) for what, error in causes.items()}
    failed = {what: words for each in reversed(world.gather_objects(mine)) for what, words in each.items()}
    if not failed:
        return []
    stuck = [
        f"{trial.what} {STUCK}: {_words(error)}"
        for trial in reversed(trials)
        if (strict or trial.what in failed) and (error := _trouble(trial.undo)) is not None
    ]
    if strict or any(world.gather_objects(stuck)):
        said = "; ".join([f"{what}: {words}" for what, words in mine.items()] + stuck)
        _together(world, place, said, next(iter(causes.values()), None))
    return [f"{what}: {words}" for what, words in failed.items()]


def _taken(kept: Kept, reading: Reading) -> Callable[[], None]:
    try:
        return kept.take(reading)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, EasympError):
            raise
        raise CheckpointError(
            f"the manifest does not hold what a {type(kept).__name__} writes ({_words(error)}): load another checkpoint"
        ) from error


def _trouble(act: Callable[[], object]) -> Exception | None:
    """What went wrong in `act`. Whatever it was, the other ranks wait to hear of it."""
    try:
        act()
    except Exception as error:
        return error
    return None


def _words(error: Exception | None) -> str:
    if error is None:
        return ""
    said = str(error) or type(error).__name__
    return said if isinstance(error, (OSError, EasympError)) else f"{type(error).__name__}: {error}"


def _together(world: World, place: str, said: str, cause: Exception | None = None, what: str = "") -> None:
    """Raise on all ranks what went wrong on any. `what` became of the checkpoint; if "", it was not loaded."""
    everyones = world.gather_objects(said)
    by_words: dict[str, list[str]] = {}
    for rank, words in enumerate(everyones):
        if words:
            by_words.setdefault(words, []).append(str(rank))
    if by_words:
        who = {
            words: f"rank {', '.join(ranks)}: " if len(ranks) < world.size else ""
            for words, ranks in by_words.items()
        }
        told = "; ".join(who[words] + words for words in by_words)
        what = what or ("was not loaded" if STUCK in told else "was not loaded, and nothing has changed")
        raise CheckpointError(f"{place} {what}: {told}") from cause
