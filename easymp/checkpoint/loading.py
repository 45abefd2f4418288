"""Loading: all is checked and read before anything live changes, and all ranks go on, or none."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import CheckpointError, EasympError
from ..world import World
from .committed import open_manifest
from .folders import current
from .manifest import Manifest
from .snapshot import Kept, Reading
from .storage import Storage, Tick


def load(
    world: World, storage: Storage, name: str, kept: Sequence[Kept], strict: bool = True, tick: Tick = lambda n: None
) -> Manifest:
    """Put the checkpoint `name` of `storage` into what is live, on all ranks together.

    Raises:
        CheckpointError: on every rank, if it does not fit or cannot be read on one; nothing live has changed.
    """
    puts = []
    reading = None
    said = ""
    try:
        name = current(storage, name)
        reading = Reading(storage, name, open_manifest(storage, name), world.rank, strict)
        puts = [k.take(reading) for k in kept]
        reading.run(tick)
    except (OSError, EasympError) as error:
        said = str(error)
    everyones = world.gather_objects(said)
    wrong = {words: rank for rank, words in reversed(list(enumerate(everyones))) if words}
    if wrong:
        words = "; ".join(
            f"rank {rank}: {words}" if world.size > 1 else words for words, rank in sorted(wrong.items(), key=lambda i: i[1])
        )
        raise CheckpointError(f"{storage.place}/{name} was not loaded, and nothing has changed: {words}")
    for put in puts:
        put()
    assert reading is not None
    return reading.manifest
