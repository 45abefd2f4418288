"""Whole tensors to rank 0 at its own pace: between two of them it may be at its disk for longer than a collective waits.

So the others wait for its word in the store, where it shows life meanwhile, and send when it is there to receive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ..distributed import World
from .gathering import Gathering
from .huggingface import Item
from .meeting import Meeting, Store

EACH = 2**28  # bytes from one word to the next


def hand_over(
    world: World,
    gathering: Gathering,
    shards: Sequence[Sequence[Item]],
    write: Callable[[Callable[[str], Tensor | None]], str],
) -> str:
    """Rank 0 calls `write` with what brings it the tensors of `shards`, in their order; all ranks go along, and return what it said.

    Where `write` gives up half-way, the other tensors are handed over all the same, and dropped.

    Raises:
        CheckpointError: rank 0 shows no life any more.
        WorldError: another rank is gone.
    """
    turns = {name: f"turn/{number}" for number, name in enumerate(_first_of_each(shards))}
    waiting = iter([item.name for shard in shards for item in shard])
    with Meeting(Store(world), 0) as meeting:

        def bring(name: str) -> Tensor | None:
            if name in turns and world.rank == 0:
                meeting.announce(turns[name], b"")
            elif name in turns:
                meeting.announced(turns[name])
            return gathering.bring(name)

        if world.rank == 0:
            said = write(lambda name: bring(next(waiting)))
        for name in waiting:
            bring(name)
        if world.rank:
            said = meeting.announced("end").decode()
            meeting.give("done", b"")
        else:
            meeting.announce("end", said.encode())
            meeting.gather("done", b"")
            meeting.forget(turns.values())
    return said


def _first_of_each(shards: Sequence[Sequence[Item]]) -> list[str]:
    """The first tensor of each file, and of what follows `EACH` bytes of it."""
    names = []
    for shard in shards:
        held = EACH
        for item in shard:
            if held >= EACH:
                names.append(item.name)
                held = 0
            held += item.bytes
    return names
