"""Ranks that wait for one another for seconds only, once all have come: to come may take long on a busy machine."""

from __future__ import annotations

from easymp.distributed import World


def hurry(world: World, seconds: float) -> None:
    """From now on collectives of this rank wait so long for the others."""
    world.timeout = seconds
    world.hurry_groups()
