"""The ranks of a run: who this process is, and what it can say to the others."""

from .ranks import Ranks, read_ranks
from .world import World, locate, odd_one_out

__all__ = ["Ranks", "World", "locate", "odd_one_out", "read_ranks"]
