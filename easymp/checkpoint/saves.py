"""The saves of a run: one at a time, here or in the background, and what is kept of earlier ones."""

from __future__ import annotations

from collections.abc import Sequence

from ..world import World
from .saving import Save, Target
from .snapshot import Kept
from .storage import Tick


class Saves:
    """One a run; every call is made by all ranks together."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._number = 0

    def save(
        self,
        target: Target,
        kept: Sequence[Kept],
        asynchronous: bool = False,
        limit: int | None = None,
        tick: Tick = lambda n: None,
    ) -> None:
        """Write a checkpoint of what is `kept`.

        Args:
            asynchronous: return as soon as the state is copied; a thread writes. The next save waits for it.
            limit: committed checkpoints named by steps that stay beside `target`'s, the newest ones; None for all.

        Raises:
            CheckpointError: on every rank; also what an asynchronous save before this one met with.
        """
        self._number += 1
        Save(self._world, target, kept, self._number).run(tick)

    def wait(self) -> None:
        """Until what is being written is committed; raises what it met with."""

    def close(self) -> None:
        """As `wait`; the run is over."""
        self.wait()
