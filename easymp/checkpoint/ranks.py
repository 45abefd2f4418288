"""Ranks that act together: errors that all of them raise, and meetings in their common store.

A meeting in the store is no collective, so that a thread can save while others train, and a disk may take longer than a
collective may. Each rank sends a heartbeat meanwhile; a waiting rank gives up when another one has sent none for the
world's timeout.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

from ..distributed import World
from ..distributed.mailbox import Mailbox
from ..errors import CheckpointError, EasympError, WorldError
from .codec import dumps

T = TypeVar("T")
STOPPED = "stopped, as another rank failed"
INTERRUPTED = "interrupted"
NOT_BEGUN = "the checkpoint was not begun: "
HEARTBEAT = 1.0  # seconds between two signs of life
HURRY = 10.0  # seconds without a sign after which a rank counts as dead, for a process that is about to end
STORE_GONE = "the ranks' common store is gone: rank 0, which has it, ended or was killed"


def error_text(error: Exception | None) -> str:
    if error is None:
        return ""
    if isinstance(error, (OSError, EasympError)):
        return str(error) or type(error).__name__
    return f"{type(error).__name__}: {error}"


def join_errors(texts: Sequence[str]) -> str:
    """The errors of all ranks ("" if a rank has none), each once, with the first rank that has it."""
    causes = [text for text in texts if text and text != STOPPED] or texts
    ranks = {text: rank for rank, text in reversed(list(enumerate(texts))) if text and text in causes}
    by_rank = sorted((rank, text) for text, rank in ranks.items())
    return "; ".join(f"rank {rank}: {text}" if len(texts) > 1 else text for rank, text in by_rank)


def attempt(function: Callable[[], T]) -> tuple[Exception | None, T]:
    """The error of `function`, or None, and its result."""
    try:
        return None, function()
    except Exception as error:
        return error, cast(T, None)


def run_on_rank_0(world: World, function: Callable[[], T], prefix: str = "") -> T:
    """Run `function` on rank 0, and return its result, or raise its error after `prefix`, on all ranks."""
    error, result = (None, cast(T, None)) if world.rank else attempt(function)
    text, result = world.broadcast_objects([error_text(error), result])
    if text:
        raise CheckpointError(f"{prefix}{text}")
    return cast(T, result)


def run_on_all(world: World, function: Callable[[], T], prefix: str = "") -> list[T]:
    """Run `function` on every rank; return all results, or raise all errors after `prefix`, on all ranks."""
    error, result = attempt(function)
    texts, results = zip(*world.gather_objects((error_text(error), result)))
    if errors := join_errors(texts):
        raise CheckpointError(f"{prefix}{errors}") from error
    return list(results)


class Meeting:
    """This rank's part of the meetings of a run. All ranks make it, and begin each meeting by a ``with`` block."""

    def __init__(self, world: World) -> None:
        self.rank, self.size, self.failed, self.hurried = world.rank, world.size, False, False
        self._timeout, self._number, self._call = world.timeout, 0, 0
        self._box: Any = Mailbox.open(world.store(), "saves", world.rank, world.size) if world.size > 1 else None

    def __enter__(self) -> Meeting:
        if self.size > 1:
            self._forget(range(1, self._call + 1))
        self._number += 1
        self._call, self.failed = 0, False
        self._stop = threading.Event()
        # By rank: the last heartbeat, and the time when it was seen.
        self._heartbeats = dict.fromkeys(range(self.size), (0, time.monotonic()))
        self._thread = threading.Thread(target=self._beat, name="easymp-beat", daemon=True)
        if self.size > 1:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self.size > 1:
            self._thread.join()

    def _beat(self) -> None:
        with suppress(RuntimeError):  # the store is gone: the next wait says so
            while True:
                self._box.store.add(f"alive/{self.rank}", 1)
                self.failed = self._box.has(f"{self._number}/failed")
                if self._stop.wait(HEARTBEAT):
                    return

    def fail(self) -> None:
        self._post("failed", b"")

    def gather(self, value: bytes) -> list[bytes | CheckpointError]:
        """On rank 0: each rank's value, or the error that its heartbeat stopped. Others do not wait, and get none."""
        self._call += 1
        if self.rank:
            self._post(f"{self._call}/{self.rank}", value)
            return []
        gathered: list[bytes | CheckpointError] = [value]
        for rank in range(1, self.size):
            try:
                gathered.append(self._wait(f"{self._call}/{rank}", rank))
            except CheckpointError as error:
                gathered.append(error)
                self.fail()
        return gathered

    def broadcast(self, value: bytes = b"") -> bytes:
        """Rank 0's value, on all ranks."""
        self._call += 1
        if self.rank:
            return self._wait(str(self._call))
        self._post(str(self._call), value)
        return value

    def run(self, function: Callable[[], Any], on_error: Callable[[], None] = lambda: None) -> tuple[list[Any], Any]:
        """Run `function` on every rank; returns all results on rank 0, and rank 0's result. Errors are raised on all.

        `on_error`: called before the other ranks learn of an error.
        """
        if self.size == 1:
            result = function()
            return [result], result
        text, result, interrupt = "", None, None
        try:
            result = function()
        except Exception as error:
            text = error_text(error)
        except BaseException as error:  # the other ranks must learn of it
            text, interrupt = INTERRUPTED, error
        if text:
            self.fail()
        answers = self.gather(dumps([text, result]))
        reports: list[Any] = [[str(a), None] if isinstance(a, CheckpointError) else json.loads(a) for a in answers]
        self._forget([self._call - 1])
        errors = join_errors([report[0] for report in reports])
        if errors:
            on_error()
        errors, first = json.loads(self.broadcast(dumps([errors, result])))
        if interrupt is not None:
            raise interrupt
        if errors:
            raise CheckpointError(errors)
        return [report[1] for report in reports], first

    def leave(self, reason: str) -> None:
        """Give the others the `reason` that their next `run` raises."""
        if self.rank:
            self.gather(dumps([reason, None]))
        else:
            self._call += 1
            self.broadcast(dumps([f"rank 0: {reason}", None]))

    def _post(self, key: str, value: bytes) -> None:
        if self.size > 1:
            with _store_needed():
                self._box.post(f"{self._number}/{key}", value)

    def _wait(self, key: str, rank: int = 0) -> bytes:
        key = f"{self._number}/{key}"
        with _store_needed():
            self._box.wait([key], look=lambda: self._check_alive(rank))
            value: bytes = self._box.read(key)
            if rank:  # only rank 0 reads it
                self._box.delete(key)
        return value

    def _check_alive(self, rank: int) -> None:
        heartbeat = self._box.store.add(f"alive/{rank}", 0)
        if heartbeat != self._heartbeats[rank][0]:
            self._heartbeats[rank] = heartbeat, time.monotonic()
        silent = time.monotonic() - self._heartbeats[rank][1]
        ending = self.hurried or not threading.main_thread().is_alive()
        if silent > (min(self._timeout, HURRY) if ending else self._timeout):
            raise CheckpointError(f"no sign of life for {silent:.0f} s: it ended, was killed or stopped")

    def _forget(self, calls: Sequence[int]) -> None:
        """On rank 0, delete the broadcast values of finished calls."""
        if self.rank == 0:
            with suppress(RuntimeError):  # the store is gone: the next wait says so
                self._box.delete(f"{self._number}/failed", *(f"{self._number}/{call}" for call in calls))


@contextmanager
def _store_needed() -> Iterator[None]:
    """Turn a lost store into a CheckpointError."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{STORE_GONE} ({error})") from error


# -- a save that the main process alone calls, as in ``if accelerator.is_main_process: accelerator.save_state(...)`` ---
#
# The main process cannot see from its own call whether the other ranks will make it, too. So it asks their listeners
# (threads that wait at the store) until each rank either makes the call, or has begun a collective that the main
# process has not begun. All ranks begin collectives in one order, so that rank has passed the call. It waits in that
# collective, and its state does not change meanwhile.


WAITING = "here"  # the answer of a rank that makes the call
PAUSE = 0.02  # seconds between two questions


class SaveCalls:
    """Finds out which ranks call a save."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_waiting = False  # for the main process's answer
        self._answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        if world.watch is not None:
            world.watch.told |= {
                "save": lambda: WAITING if self._is_waiting else json.dumps(world.position()),
                "together": lambda: self._answer(True),
                "alone": lambda: self._answer(False),
            }

    def _answer(self, all_call: bool) -> str:
        self._is_waiting = False
        self._answers.put(all_call)
        return WAITING

    def all_called(self) -> bool:
        """Whether all ranks make the call; WorldError if one neither makes it nor begins a collective in time."""
        world = self._world
        if world.rank:
            self._is_waiting = True
            try:
                return self._answers.get(timeout=world.timeout)
            except queue.Empty:
                raise WorldError(
                    f"rank {world.rank} came to save_state(), and rank 0 did not within {world.timeout:g} s"
                ) from None
            finally:
                self._is_waiting = False
        callers = [rank for rank in range(1, world.size) if self._calls(rank)]
        all_call = len(callers) == world.size - 1
        for rank in callers:
            self._ask(rank, "together" if all_call else "alone")
        return all_call

    def _calls(self, rank: int) -> bool:
        own_position, deadline = self._world.position(), time.monotonic() + self._world.timeout
        while time.monotonic() < deadline:
            answer = "" if self._world.has_left(rank) else self._ask(rank, "save")
            if answer == WAITING:
                return True
            if not answer:  # it has ended
                return False
            position = json.loads(answer)
            if any(position[kind] > number for kind, number in own_position.items() if kind in position):
                return False
            time.sleep(PAUSE)
        raise WorldError(
            f"save_state(): rank {rank} neither came nor went on to a collective within {self._world.timeout:g} s"
        )

    def _ask(self, rank: int, question: str) -> str:
        assert self._world.watch is not None
        return self._world.watch.ask(rank, question)
