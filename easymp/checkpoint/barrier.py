"""Ranks meet in the course of a save through the process group's store, not by collectives: a thread may do so while others train.

Each rank shows life once a second while it works. A rank that waits for another gives up when that one has shown none for the world's
timeout: it was killed, or its machine is gone. Work itself may take any time.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterable
from types import TracebackType

import torch.distributed as dist

from ..distributed import World
from ..errors import CheckpointError

BEAT = 1.0  # seconds between two signs of life
HURRY = 10.0  # seconds without a sign after which a rank counts as dead, for a process that is about to end
STOPPED = "stopped, as another rank failed"
CHUNK = 2**22  # bytes of one value in the store: its server closes connections that send it more than 8 MiB
GONE = "the ranks' common store is gone: rank 0, which has it, ended or was killed"


class Store:
    """This rank's connection for all saves of a run; all ranks make it together."""

    def __init__(self, world: World) -> None:
        self.rank, self.size, self.timeout = world.rank, world.size, world.timeout
        self.hurried = False
        self._store: dist.Store | None = None
        if world.size > 1:
            store = world.store()
            # Counted there: another run of this process may have used the same store before.
            self._store = dist.PrefixStore(f"saves/{store.add(f'saves/{world.rank}', 1)}", store)

    def patience(self) -> float:
        """Seconds to wait for a sign of life."""
        ending = self.hurried or not threading.main_thread().is_alive()
        return min(self.timeout, HURRY) if ending else self.timeout

    def __call__(self) -> dist.Store:
        assert self._store is not None, "a world of one has no store"
        return self._store


class Barrier:
    """One save's meeting: ``with barrier``, on all ranks with the same number, which no other save has."""

    def __init__(self, store: Store, number: int) -> None:
        self.rank, self.size = store.rank, store.size
        self._store, self._tag = store, str(number)
        self._over = threading.Event()
        self._failed = False
        # Of each rank: its last beat, and when that was noticed.
        self._seen = dict.fromkeys(range(store.size), (0, time.monotonic()))
        self._thread = threading.Thread(target=self._beat, name="easymp-beat", daemon=True)

    def __enter__(self) -> Barrier:
        if self.size > 1:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self.size > 1:
            self._thread.join()

    def _beat(self) -> None:
        try:
            while True:
                self._store().add(f"alive/{self.rank}", 1)
                self._failed = self._store().check([f"{self._tag}/failed"])
                if self._over.wait(BEAT):
                    return
        except RuntimeError:
            pass  # the store is gone: the next wait says so

    def check(self) -> None:
        """To be called while working: raises a CheckpointError, STOPPED, once another rank has called `fail`."""
        if self._failed:
            raise CheckpointError(STOPPED)

    def fail(self) -> None:
        """This save is lost: the others need not go on."""
        self._put("failed", b"")

    def give(self, what: str, mine: bytes) -> None:
        """For rank 0 to `gather`; called by the others."""
        self._put(f"{what}/{self.rank}", mine)

    def gather(self, what: str, mine: bytes) -> list[bytes | CheckpointError]:
        """On rank 0: each rank's value, or the error that it shows no life any more."""
        gathered: list[bytes | CheckpointError] = [mine]
        for rank in range(1, self.size):
            try:
                gathered.append(self._take(f"{what}/{rank}", rank, last=True))
            except CheckpointError as error:
                gathered.append(error)
                self.fail()
        return gathered

    def announce(self, what: str, word: bytes) -> None:
        """Rank 0's word, for `announced`."""
        self._put(what, word)

    def announced(self, what: str) -> bytes:
        """Rank 0's word, on the others.

        Raises:
            CheckpointError: rank 0 shows no life.
        """
        return self._take(what, 0)

    def forget(self, also: Iterable[str] = ()) -> None:
        """This save is over on all ranks: remove its values, and those of other names, from the store."""
        if self.size > 1 and self.rank == 0:
            try:
                for what in ("failed", "begin", "end", *also):
                    self._delete(f"{self._tag}/{what}")
            except RuntimeError:
                pass  # the store is gone: the next wait says so

    def _put(self, what: str, value: bytes) -> None:
        if self.size == 1:
            return
        value = zlib.compress(value, 1)
        chunks = [value[i : i + CHUNK] for i in range(0, len(value), CHUNK)]
        try:
            for i, chunk in enumerate(chunks[1:], 1):
                self._store().set(f"{self._tag}/{what}/+{i}", chunk)
            self._store().set(f"{self._tag}/{what}", len(chunks).to_bytes(4, "little") + chunks[0])
        except RuntimeError as error:
            raise CheckpointError(f"{GONE} ({error})") from error

    def _take(self, what: str, rank: int, last: bool = False) -> bytes:
        """A value of another rank, once it is there; `last`: no other rank will ask for it."""
        name, pulse = f"{self._tag}/{what}", f"alive/{rank}"
        pause = 0.001
        try:
            while not self._store().check([name]):
                now = self._store().add(pulse, 0)
                if now != self._seen[rank][0]:
                    self._seen[rank] = now, time.monotonic()
                silent = time.monotonic() - self._seen[rank][1]
                if silent > self._store.patience():
                    raise CheckpointError(
                        f"no sign of life for {silent:.0f} s: it ended, was killed, or is stopped"
                    )
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
            first = self._store().get(name)
            rest = [self._store().get(f"{name}/+{i}") for i in range(1, int.from_bytes(first[:4], "little"))]
            if last:
                self._delete(name)
        except RuntimeError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{GONE} ({error})") from error
        return zlib.decompress(b"".join([first[4:], *rest]))

    def _delete(self, name: str) -> None:
        if self._store().check([name]):
            for i in range(1, int.from_bytes(self._store().get(name)[:4], "little")):
                self._store().delete_key(f"{name}/+{i}")
            self._store().delete_key(name)
