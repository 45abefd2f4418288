"""The store that all ranks share, as a mailbox beside all collectives; and each rank's listener there.

A collective that times out says nothing about the other ranks. So each rank keeps one thread (`Watch`) that sleeps in
the store until another rank asks. It then answers with the rank's last collective (torch's flight recorder) and the
line of its training thread. A rank that is stuck in a collective or asleep can still answer, for both release the
interpreter.
"""

from __future__ import annotations

import copy
import json
import pickle  # noqa: TID251  # of bytes that this process's torch has just made
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
CHUNK = 2**22  # bytes of one value: the store's server closes connections that send it more than 8 MiB
FOREVER = timedelta(days=30)
POLL = 0.05  # longest pause in seconds between two looks at the store

ABORT, CLOSE = "abort", "close"  # messages that are no questions
PATIENCE = 3.0  # seconds for an answer
STORE_GONE = "rank 0, which holds the store,"

# What gloo, NCCL and the store write of another rank that is late, gone, or in another collective.
PEER_SIGNS = (
    "timed out", "timeout", "connection closed by peer", "connection reset", "connection refused", "broken pipe",
    "failed to pass monitoredbarrier", "connectfullmesh", "connection was likely closed", "has left the run",
)  # fmt: skip
# A torch without CUDA has the first alone. Without "_json" they also give the lines of the calls.
RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
# easymp, Python, and code without a file.
LIBRARIES = (str(Path(__file__).parent.parent), str(Path(threading.__file__).parent), "<")
PACKAGES = ("site-packages", "dist-packages")  # the latter on Debian


def with_timeout(call: Callable[[], T], seconds: float) -> T:
    """Run `call` in a thread: torch's stores wait for ever for a stopped server, and ignore signals meanwhile."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="easymp-store", daemon=True).start()
    if not wait([future], seconds).done:
        raise TimeoutError(f"no answer in {seconds:g} seconds")
    return future.result()


class Mailbox:
    """One rank's connection to a part of the store. Where the store is gone, every method raises torch's RuntimeError.

    `number` counts the parts of one name, from 1; it is 0 without a name.
    """

    def __init__(self, store: dist.Store, rank: int = 0, size: int = 1, number: int = 0) -> None:
        self.store, self.rank, self.size, self.number = store, rank, size, number

    @classmethod
    def open(cls, store: dist.Store, name: str, rank: int, size: int) -> Mailbox:
        """Open a new part of the store, on all ranks together under the same `name`. The store counts the parts."""
        number = store.add(f"{name}/{rank}", 1)
        return cls(dist.PrefixStore(f"{name}/{number}", store), rank, size, number)

    def clone(self) -> Self:
        """The same mailbox over a connection of its own, for another thread."""
        mailbox = copy.copy(self)
        mailbox.store = self.store.clone()  # type: ignore[attr-defined]  # torch's stub lacks it
        return mailbox

    # -- values by key

    def post(self, key: str, value: bytes = b"") -> None:
        value = zlib.compress(value, 1)
        chunks = [value[i : i + CHUNK] for i in range(0, len(value), CHUNK)]
        for i, chunk in enumerate(chunks[1:], 1):
            self.store.set(f"{key}/+{i}", chunk)  # type: ignore[arg-type]  # torch's stub lacks bytes
        self.store.set(key, len(chunks).to_bytes(4, "little") + chunks[0])  # type: ignore[arg-type]

    def has(self, *keys: str) -> bool:
        """Whether values of all these keys were posted."""
        return bool(self.store.check(list(keys)))

    def read(self, key: str) -> bytes:
        """A posted value. Waits for the store's own timeout where there is none."""
        head = self.store.get(key)
        chunks = [self.store.get(f"{key}/+{i}") for i in range(1, int.from_bytes(head[:4], "little"))]
        return zlib.decompress(b"".join([head[4:], *chunks]))

    def delete(self, *keys: str) -> None:
        for key in keys:
            if self.has(key):
                for i in range(1, int.from_bytes(self.store.get(key)[:4], "little")):
                    self.store.delete_key(f"{key}/+{i}")
                self.store.delete_key(key)

    def wait(
        self,
        keys: Sequence[str],
        seconds: float = inf,
        look: Callable[[], object] = lambda: None,
        longest: float = POLL,
        patience: float = 0.0,
    ) -> None:
        """Wait until values of all `keys` were posted, at most `seconds`.

        The store may take `patience` seconds to answer (0: any time). It is asked again after a call of `look` and a
        pause of at most `longest` seconds. An error of `look` ends the wait. A TimeoutError lists the indices of
        missing `keys`, or says that the store does not answer.
        """
        deadline, pause = time.monotonic() + seconds, 0.001
        while not (with_timeout(lambda: self.has(*keys), patience) if patience else self.has(*keys)):
            if time.monotonic() > deadline:
                raise TimeoutError([i for i, key in enumerate(keys) if not self.has(key)])
            look()
            time.sleep(pause)
            pause = min(2 * pause, longest)

    # -- values of all ranks

    def of_ranks(self, key: str) -> list[str]:
        """Return ``f"{key}/{rank}"`` for each rank."""
        return [f"{key}/{rank}" for rank in range(self.size)]

    def barrier(self, key: str, seconds: float = inf, value: bytes = b"") -> None:
        """Post `value` under `key`, where other ranks may read it, and wait until all have posted. Raises as `wait`."""
        self.post(f"{key}/{self.rank}", value)
        self.wait(self.of_ranks(key), seconds)

    # -- messages in order

    def send(self, box: str, message: str) -> int:
        """Add a message to a box. Return its number, from 1."""
        number = self.store.add(f"{box}/count", 1)
        self.store.set(f"{box}/{number}", message)
        return number

    def messages(self, box: str) -> dict[int, str]:
        """The messages of a box so far, by number."""
        return {i: self.message(box, i) for i in range(1, self.store.add(f"{box}/count", 0) + 1)}

    def message(self, box: str, number: int) -> str:
        """Wait for a message of a box."""
        self.store.wait([f"{box}/{number}"], FOREVER)
        return self.store.get(f"{box}/{number}").decode()


class Watch:
    """One rank's listener. `close` ends it.

    Args:
        abort: called in the listener's thread with the number of a group that another rank breaks off.

    Attributes:
        inbox: the listener's connection; another thread needs a clone.
        training_thread: the reported thread: the one that made this, until another one calls an Accelerator.
        told: by the word of a question, the function that answers it, in the listener's thread.
    """

    def __init__(
        self, rank: int, size: int, store: dist.Store, abort: Callable[[int], None] = lambda group: None
    ) -> None:
        self.rank, self.size, self._abort = rank, size, abort
        # A thread that waits in a connection blocks it: the listener has one, and `compare`, which a timeout leaves
        # behind.
        self.inbox = Mailbox.open(store, "easymp/watch", rank, size).clone()
        self._questions, self._comparisons = self.inbox.clone(), self.inbox.clone()
        self._store_is_silent = False
        self.training_thread = threading.get_ident()
        self.told: dict[str, Callable[[], str]] = {"where": self._location}
        self._thread = threading.Thread(target=self._listen, name="easymp-watch", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with suppress(RuntimeError):  # the store is gone
            for number in count(1):
                kind, _, argument = self.inbox.message(str(self.rank), number).partition(" ")
                if kind == CLOSE:
                    return
                if kind == ABORT:
                    self._abort(int(argument))
                else:
                    answer = self.told[kind]() if kind in self.told else ""
                    self.inbox.post(argument, answer.encode())

    def close(self) -> None:
        if self.reachable():  # else the thread has ended, or waits for ever
            with suppress(RuntimeError):  # rank 0 and its store have ended since
                self._questions.send(str(self.rank), CLOSE)
            self._thread.join(5.0)

    # -- questions

    def _location(self) -> str:
        frame = sys._current_frames().get(self.training_thread)
        stack = traceback.extract_stack(frame) if frame else []
        line = next((f"{f.filename}:{f.lineno} in {f.name}" for f in reversed(stack) if is_script(f.filename)), "")
        return f"{last_collective()}; at {line or 'outside Python'}"

    def report(self) -> str:
        """One line a rank: its last collective and the line it is at."""
        lines = [f"  rank {self.rank}: {self._location()}"]
        try:
            for rank in range(self.size) if self.reachable() else ():
                if rank != self.rank:
                    answer = self.ask(rank) or "no answer: it has ended, was killed, or is stopped"
                    lines.append(f"  rank {rank}: {answer}")
        except RuntimeError:
            self._store_is_silent = True
        if self._store_is_silent:
            lines.append(f"  the other ranks cannot be asked: {STORE_GONE} has ended, was killed, or is stopped")
        return "\n".join(lines)

    def ask(
        self, rank: int, question: str = "where", mailbox: Mailbox | None = None, patience: float = PATIENCE
    ) -> str:
        """Ask `rank` one of the questions that `told` answers; returns the answer, "" if none comes in time."""
        mailbox = mailbox or self._questions
        key = f"answer/{self.rank}-{rank}-{mailbox.store.add('answers', 1)}"
        mailbox.send(str(rank), f"{question} {key}")
        try:
            mailbox.wait([key], patience)
        except TimeoutError:
            return ""
        return mailbox.read(key).decode()

    def ask_all(self, question: str, patience: float) -> list[str] | None:
        """The answers of all ranks to a question that is asked once in a run. None where one does not answer."""
        keys = self._questions.of_ranks(f"answers/{question}")
        if self._questions.store.add(f"asked/{question}", 1) == 1:
            for rank, key in enumerate(keys):
                self._questions.send(str(rank), f"{question} {key}")
        try:
            self._questions.wait(keys, patience)
        except TimeoutError:
            return None
        answers = [self._questions.read(key).decode() for key in keys]
        return answers if all(answers) else None

    def abort_others(self, group: int) -> None:
        """Let every other rank abort the collectives of this group: kernels that wait on the device end by an error."""
        for rank in range(self.size):
            if rank != self.rank:
                self._questions.send(str(rank), f"{ABORT} {group}")

    def reachable(self) -> bool:
        """Whether the store answers. A request to a stopped one would not return."""
        if not self._store_is_silent:
            try:
                with_timeout(lambda: self._questions.has("any"), PATIENCE)
            except (TimeoutError, RuntimeError):
                self._store_is_silent = True
        return not self._store_is_silent

    # -- meetings of all ranks, each with the number of its group and its own number

    def compare(self, group: int, number: int, text: str, seconds: float) -> bool:
        """Wait until all ranks have come to this comparison. Return whether all brought the same text."""
        try:
            verdict = with_timeout(partial(self._verdict, group, number, text, seconds), seconds + PATIENCE)
        except dist.DistStoreError:
            raise RuntimeError(f"timed out: not all ranks have called it within {seconds:g} s") from None
        except TimeoutError:
            self._store_is_silent = True
            raise RuntimeError(f"timed out: {STORE_GONE} does not answer") from None
        if verdict not in ("same", "differs"):
            raise RuntimeError(verdict)
        return verdict == "same"

    def _verdict(self, group: int, number: int, text: str, seconds: float) -> str:
        """The word of the last rank that came to a comparison, or the sentence of one that has left before."""
        key, store = f"compare/{group}/{number}", self._comparisons.store
        if store.compare_set(f"{key}/first", "", text).decode() != text:
            store.set(f"{key}/differs", "")
        if store.add(f"{key}/arrived", 1) == self.size:
            store.set(f"{key}/verdict", "differs" if store.check([f"{key}/differs"]) else "same")
            for name in ("first", "arrived", "verdict"):  # all ranks have left the comparison before
                store.delete_key(f"compare/{group}/{number - 1}/{name}")
        store.wait([f"{key}/verdict"], timedelta(seconds=seconds))
        return store.get(f"{key}/verdict").decode()

    def arrive(self, group: int, turn: int) -> None:
        """Release ranks that wait for this one in `wait_for_all`."""
        self._questions.post(f"turn/{group}/{turn}/{self.rank}")

    def wait_for_all(self, group: int, turn: int, seconds: float) -> None:
        """Wait until all ranks have arrived, for as long as they are alive and in the group."""
        keys = self._questions.of_ranks(f"turn/{group}/{turn}")
        last_answer = last_question = time.monotonic()

        def check_missing_ranks() -> None:
            nonlocal last_answer, last_question
            missing = [rank for rank, key in enumerate(keys) if not self._questions.has(key)]
            if missing and self.has_left(group, missing[0]):
                raise RuntimeError(f"rank {missing[0]} has left the run")
            if missing and time.monotonic() >= last_question + seconds / 4:
                answer, last_question = self.ask(missing[0]), time.monotonic()
                if answer:
                    last_answer = last_question
                elif last_question > last_answer + seconds:
                    raise RuntimeError(f"timed out: rank {missing[0]} has not answered for {seconds:g} s")

        try:
            self._questions.wait(keys, look=check_missing_ranks, longest=0.5, patience=seconds)
        except TimeoutError:
            self._store_is_silent = True
            raise RuntimeError(f"timed out: {STORE_GONE} has not answered for {seconds:g} s") from None

    def leave(self, group: int, comparison: int) -> None:
        """Fail `compare` and `wait_for_all` on ranks that wait for this one; `comparison` would be its next."""
        if self.reachable():
            with suppress(RuntimeError):  # rank 0 and its store have ended since
                self._questions.store.set(f"compare/{group}/{comparison}/verdict", f"rank {self.rank} has left the run")
                self._questions.post(f"left/{group}/{self.rank}")

    def has_left(self, group: int, rank: int) -> bool:
        """Whether `rank` has left group number `group`."""
        return self._questions.has(f"left/{group}/{rank}")

    @staticmethod
    def caused_by_peer(error: BaseException) -> bool:
        """Whether a backend's error means that another rank is late, has ended, or makes another call."""
        text = str(error).lower()
        return any(sign in text for sign in PEER_SIGNS)


# -- torch's flight recorders --------------------------------------------------------------------------------


def collective_name(entry: Mapping[str, Any]) -> str:
    return str(entry.get("profiling_name", "?")).split(":")[-1]


def recorder_entries(active_only: bool = False, with_lines: bool = False) -> Iterator[dict[str, Any]]:
    """The entries of each recorder, the oldest first."""
    for name in RECORDERS:
        dump = getattr(torch._C._distributed_c10d, name.removesuffix("_json") if with_lines else name, None)
        if dump is not None:
            recording = pickle.loads(dump(True, True, False)) if with_lines else json.loads(dump(True, active_only))
            yield from recording.get("entries", [])


def is_script(file: str) -> bool:
    """Whether a file is the user's, and not of easymp, Python or a package."""
    return not file.startswith(LIBRARIES) and not any(folder in file for folder in PACKAGES)


def last_collective() -> str:
    """A phrase for the newest entry of the recorders."""
    try:
        entries = list(recorder_entries())
    except (RuntimeError, ValueError):
        return "last collective unknown"
    if not entries:
        return "no collective yet"
    newest = max(entries, key=lambda entry: entry.get("time_created_ns", 0))
    name = f"{collective_name(newest)}{newest.get('input_sizes', '')}"
    return f"last collective #{newest.get('collective_seq_id', '?')} {name} ({newest.get('state', '?')})"
