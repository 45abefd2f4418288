"""The place of every rank, for the error of a rank that waited in vain.

A collective that times out says nothing about the others. So each rank keeps one thread that sleeps in the store until another rank
asks; it then answers with its last collective (torch's flight recorder) and the line of its training thread. A rank that is stuck in a
collective or asleep can still answer, for both release the interpreter.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FOREVER = timedelta(days=30)
ABORT = "abort "  # message of a rank that breaks off, before the number of its group
RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
PATIENCE = timedelta(seconds=3)
NOT_THE_USERS = (str(Path(__file__).parent.parent), str(Path(threading.__file__).parent))  # easymp and Python

# Words of gloo, NCCL and the store for another rank that is late, gone, or in another collective.
PEER_SIGNS = (
    "timed out", "timeout", "connection closed by peer", "connection reset", "connection refused", "broken pipe",
    "failed to pass monitoredbarrier", "connectfullmesh", "connection was likely closed", "has left the run",
)  # fmt: skip


def in_time(call: Callable[[], Any], seconds: float) -> Any:
    """The result of `call`, run in a thread: torch's stores wait for ever where no store listens, and hear no signal meanwhile."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.extend((call(), None))
        except Exception as error:
            found.extend((None, error))

    thread = threading.Thread(target=work, name="easymp-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise TimeoutError(f"no answer in {seconds:g} seconds")
    value, error = found
    if error is not None:
        raise error
    return value


class Watch:
    """One rank's listener. `close` ends it.

    Args:
        abort: called in the listener's thread when another rank breaks off, with the number of the group that it leaves.

    Attributes:
        beside: a connection to the store for a thread of its own.
        trains: the reported thread: the one that made this, until another one calls an Accelerator.
        heard: called when another rank wants an agreement (`call`); it returns this rank's answer, or None.
        told: word → called when another rank asks by it; it returns the answer.
    """

    def __init__(
        self, rank: int, size: int, store: dist.Store, abort: Callable[[int], None] = lambda group: None
    ) -> None:
        self.rank, self.size, self._abort = rank, size, abort
        # Counted in the store: worlds come and go on all ranks alike, but processes need not have lived equally long.
        number = store.add(f"easymp/watches/{rank}", 1)
        # A clone has a connection of its own: to sleep in, to ask by, and for `compare`, which may be interrupted.
        # The fourth is for threads beside the one that trains.
        clones = (dist.PrefixStore(f"easymp/watch/{number}", store.clone()) for _ in range(4))
        self._store, self._ask, self._meet, self.beside = clones
        self._silent = False  # whether the store has left a request without an answer
        self.trains = threading.get_ident()
        self.heard: Callable[[], int | None] = lambda: None
        self.told: dict[str, Callable[[], str]] = {"where": self._whereabouts}
        self._thread = threading.Thread(target=self._listen, name="easymp-watch", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        number = 0
        try:
            while True:
                number += 1
                key = f"{self.rank}/{number}"
                self._store.wait([key], FOREVER)
                asker = self._store.get(key).decode()
                if asker == "close":
                    return
                if asker.startswith(ABORT):
                    self._abort(int(asker.removeprefix(ABORT)))
                elif asker != "call":
                    word, _, key = asker.partition(" ")
                    self._store.set(key, self.told[word]() if word in self.told else "")
                elif (answer := self.heard()) is not None:
                    self._store.set(f"called/{self.rank}", str(answer))
        except RuntimeError:
            return  # the store is gone

    def _whereabouts(self) -> str:
        frame = sys._current_frames().get(self.trains)
        stack = traceback.extract_stack(frame) if frame else []
        ours = [
            f for f in stack if "site-packages" not in f.filename and not f.filename.startswith(NOT_THE_USERS)
        ]
        place = f"{ours[-1].filename}:{ours[-1].lineno} in {ours[-1].name}" if ours else "outside Python"
        return f"{last_collective()}; at {place}"

    def _send(self, rank: int, text: str, store: dist.Store | None = None) -> None:
        store = store or self._ask
        store.set(f"{rank}/{store.add(f'{rank}/count', 1)}", text)

    def _send_all(self, text: str) -> None:
        for rank in range(self.size):
            if rank != self.rank:
                self._send(rank, text)

    def report(self) -> str:
        """One line a rank: its last collective and the line it is at."""
        lines = [f"  rank {self.rank}: {self._whereabouts()}"]
        if not self.reachable():
            return f"{lines[0]}\n  the other ranks cannot be asked: rank 0, which holds the store, has ended, was killed, or is stopped"
        try:
            for rank in range(self.size):
                if rank != self.rank:
                    there = self.ask(rank) or "no answer: it has ended, was killed, or is stopped"
                    lines.append(f"  rank {rank}: {there}")
        except RuntimeError:
            lines.append(
                "  no other rank can be asked: rank 0, which holds the store, has ended or was killed"
            )
        return "\n".join(lines)

    def ask(
        self, rank: int, word: str = "where", store: dist.Store | None = None, patience: timedelta = PATIENCE
    ) -> str:
        """The answer of `rank` to a word of `told`, or ``""`` where it does not answer. RuntimeError: the store is gone."""
        store = store or self._ask
        answer = f"answer/{self.rank}-{rank}-{store.add('answers', 1)}"
        self._send(rank, f"{word} {answer}", store)
        try:
            store.wait([answer], patience)
        except RuntimeError:
            return ""
        return store.get(answer).decode()

    def reachable(self) -> bool:
        """Whether the store answers. A request to a stopped one would not return."""
        if not self._silent:
            try:
                in_time(lambda: self._ask.check(["any"]), PATIENCE.total_seconds())
            except (TimeoutError, RuntimeError):
                self._silent = True
        return not self._silent

    def compare(self, place: tuple[int, int], said: str, seconds: float) -> bool:
        """Wait until all ranks have come to `place`, a group and a number; return whether they said the same.

        Each rank makes a fixed number of requests to the store, whatever the world size. Keys of the comparison before are deleted.
        """
        group, number = place
        store = dist.PrefixStore(f"compare/{group}/{number}", self._meet)

        def come_and_wait() -> str:
            if store.compare_set("first", "", said).decode() != said:
                store.set("unlike", "")
            if store.add("came", 1) == self.size:
                store.set("end", "unlike" if store.check(["unlike"]) else "alike")
                for key in ("first", "came", "end"):  # all ranks have left the one before
                    self._meet.delete_key(f"compare/{group}/{number - 1}/{key}")
            store.wait(["end"], timedelta(seconds=seconds))
            return store.get("end").decode()

        try:
            end = in_time(come_and_wait, seconds + PATIENCE.total_seconds())
        except dist.DistStoreError:
            raise RuntimeError(f"timed out: not all ranks have called it within {seconds:g} s") from None
        except TimeoutError:
            self._silent = True
            raise RuntimeError("timed out: rank 0, which holds the store, does not answer") from None
        if end.startswith("rank"):
            raise RuntimeError(end)
        return end == "alike"

    def leave(self, place: tuple[int, int]) -> None:
        """Tell ranks that wait for this one that it does not come: `compare` at `place` and `wait_for_all` fail there."""
        if self.reachable():
            group, number = place
            for key in (f"compare/{group}/{number}/end", f"left/{group}/{self.rank}", f"left/{group}"):
                self._ask.set(key, f"rank {self.rank} has left the run")

    def has_left(self, group: int, rank: int) -> bool:
        """Whether `rank` has left the group of this number."""
        return self._ask.check([f"left/{group}/{rank}"])

    def come(self, turn: tuple[int, int]) -> None:
        """Release ranks that wait for this one in `wait_for_all`; `turn` is a group and a number."""
        self._ask.set(f"turn/{turn[0]}/{turn[1]}/{self.rank}", "")

    def wait_for_all(self, turn: tuple[int, int], seconds: float) -> None:
        """Wait until all ranks have come to `turn`, however long it takes, as long as they are alive and in its group."""
        keys = [f"turn/{turn[0]}/{turn[1]}/{rank}" for rank in range(self.size)]
        heard = asked = time.monotonic()
        pause = 0.001
        try:
            while not in_time(lambda: self._ask.check(keys), seconds):
                time.sleep(pause)
                pause = min(2 * pause, 0.5)
                if self._ask.check([f"left/{turn[0]}"]):
                    for rank, key in enumerate(keys):
                        if self.has_left(turn[0], rank) and not self._ask.check([key]):
                            raise RuntimeError(f"rank {rank} has left the run")
                if time.monotonic() < asked + seconds / 4:
                    continue
                late = next((rank for rank, key in enumerate(keys) if not self._ask.check([key])), self.rank)
                answered = self.ask(late)
                asked = time.monotonic()
                if answered:
                    heard = asked
                elif asked > heard + seconds:
                    raise RuntimeError(f"timed out: rank {late} has not answered for {seconds:g} s")
        except TimeoutError:
            self._silent = True
            raise RuntimeError(
                f"timed out: rank 0, which holds the store, has not answered for {seconds:g} s"
            ) from None

    def abort_others(self, group: int) -> None:
        """Let every other rank abort the collectives of this group: kernels that wait on the device end with an error."""
        self._send_all(f"{ABORT}{group}")

    def call(self, answer: int) -> None:
        """Give this rank's answer, and have the others' listeners give theirs."""
        self._ask.set(f"called/{self.rank}", str(answer))
        self._send_all("call")

    def answers(self, seconds: float) -> list[int] | None:
        """The answers of all ranks; None where one is missing after `seconds`."""
        keys = [f"called/{rank}" for rank in range(self.size)]
        deadline = time.monotonic() + seconds
        while not self._ask.check(keys):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.002)
        return [int(self._ask.get(key)) for key in keys]

    def close(self) -> None:
        if self.reachable():  # else the thread has ended, or waits for ever
            self._send(self.rank, "close")
            self._thread.join(5.0)

    @staticmethod
    def caused_by_peer(error: BaseException) -> bool:
        """Whether a backend's error means that another rank is late, gone, or elsewhere."""
        text = str(error).lower()
        return any(sign in text for sign in PEER_SIGNS)


def last_collective() -> str:
    """The newest entry of torch's flight recorders, in words: there is one for gloo, and one for NCCL."""
    try:
        entries = [entry for recorded in _recorded() for entry in recorded[-1:]]
    except (RuntimeError, ValueError):
        return "last collective unknown"
    if not entries:
        return "no collective yet"
    entry = max(entries, key=lambda entry: entry.get("time_created_ns", 0))
    name = str(entry.get("profiling_name", "?")).split(":")[-1]
    return f"last collective #{entry.get('collective_seq_id', '?')} {name}{entry.get('input_sizes', '')} ({entry.get('state', '?')})"


def collectives() -> dict[str, int]:
    """The number of the last collective that this rank began in each group; of groups that the recorders still know."""
    entries = [entry for recorded in _recorded() for entry in recorded if not entry.get("is_p2p")]
    return {str(entry["process_group"]): int(entry["collective_seq_id"]) for entry in entries}


def _recorded() -> Iterator[list[dict[str, Any]]]:
    """The entries of torch's flight recorders, the oldest first."""
    for name in RECORDERS:
        dump = getattr(torch._C._distributed_c10d, name, None)  # a torch without CUDA has the first alone
        if dump is not None:
            yield json.loads(dump()).get("entries", [])
