"""Where ranks meet in the course of a save, in the store and not by collectives: a thread may do so while others train."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence

from ..errors import CheckpointError
from ..world import World


class Meeting:
    """One save's. All ranks make one with the same `tag`, which no other has.

    A rank that waits gives up when another one shows no life for the world's timeout: `alive` is to be called while working.
    """

    def __init__(self, world: World, tag: str) -> None:
        self._rank, self._size, self._timeout, self._tag = world.rank, world.size, world.timeout, tag
        self._store = world.store() if world.size > 1 else None
        self._said = 0.0
        self._beat = 0

    def alive(self, count: int = 0) -> None:
        """This rank works."""
        if self._store is not None and time.monotonic() - self._said > 1.0:
            self._said = time.monotonic()
            self._beat += 1
            self._store.set(f"{self._tag}/alive/{self._rank}", str(self._beat))

    def gather(self, what: str, mine: bytes) -> Sequence[bytes] | None:
        """What each rank brought, on rank 0; None on the others."""
        if self._store is None:
            return [mine]
        if self._rank:
            self._store.set(f"{self._tag}/{what}/{self._rank}", zlib.compress(mine, 1))
            return None
        return [mine, *(self._wait(f"{what}/{rank}", rank) for rank in range(1, self._size))]

    def announce(self, what: str, word: bytes) -> bytes:
        """Rank 0's word, on all ranks."""
        if self._store is None:
            return word
        if self._rank == 0:
            self._store.set(f"{self._tag}/{what}", zlib.compress(word, 1))
            return word
        return self._wait(what, 0)

    def _wait(self, what: str, rank: int) -> bytes:
        assert self._store is not None
        name, pulse = f"{self._tag}/{what}", f"{self._tag}/alive/{rank}"
        pause, beat, since = 0.001, b"", time.monotonic()
        while not self._store.check([name]):
            self.alive()
            now = self._store.get(pulse) if self._store.check([pulse]) else b""
            if now != beat:
                beat, since = now, time.monotonic()
            if time.monotonic() - since > self._timeout:
                raise CheckpointError(f"rank {rank} has shown no life for {self._timeout:g} s while the checkpoint was written")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return zlib.decompress(self._store.get(name))
