"""Reports of collectives that wait: which ranks differ, and where, before the timeout ends the run.

A thread of each rank looks at torch's flight recorder. Where a collective has waited for ``hang_after`` seconds, the
lowest rank that waits asks the others for their calls, and compares. gloo's recorder lacks messages between two ranks:
for these, the stack and the processor time of the training thread tell that it sleeps in one.
"""

from __future__ import annotations

import json
import linecache
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..logging import get_logger
from .mailbox import Watch, collective_name, is_script, recorder_entries

logger = get_logger(__name__)
THREAD = "easymp-hang"
RECORDER_SIZE = 256  # collectives that each rank remembers
LOOKS = 8  # looks at the recorder in `hang_after` seconds
PATIENCE = 15.0  # seconds for an answer: torch needs seconds to find the first call's lines
PULSE = 1.0  # seconds between two looks at a rank that does not wait
BUSY = 0.05  # seconds of processor time within a pulse that mean that the rank works
IDLE = 0.001  # seconds of processor time between two looks, below which a thread sleeps
MESSAGES = "messages between two ranks"
# Collectives whose shapes are the same on all ranks. Those of others differ at the root, or on each rank.
SAME_SHAPES = ("all_reduce", "broadcast", "reduce_scatter", "allgather_base", "_all_gather_base")


class Call(NamedTuple):
    """One collective of one rank, as its recorder has it."""

    group: str
    number: int  # in the group, from 1
    name: str
    shapes: str
    line: str
    finished: bool

    def __str__(self) -> str:
        call = f"{self.name}({self.shapes})" if self.shapes else self.name
        return f"{call} at {self.line}" if self.line else call

    @property
    def position(self) -> str:
        """Its number and group, for a sentence."""
        return "a message" if self.group == MESSAGES else f"call {self.number} of {self.group}"

    def matches(self, call: Call) -> bool:
        """Whether two ranks' calls of one number fit together."""
        return self.name == call.name and (self.name not in SAME_SHAPES or self.shapes == call.shapes)


def recorded_calls(active_only: bool) -> list[tuple[Call, float]]:
    """This rank's collectives in order and their begin in seconds since 1970. Active ones are read without lines."""
    calls = []
    for entry in recorder_entries(active_only=True) if active_only else recorder_entries(with_lines=True):
        if not entry["is_p2p"]:
            tensors = zip(entry["input_dtypes"], entry["input_sizes"])
            call = Call(
                group="group {} ({})".format(*entry["process_group"]),
                number=int(entry["collective_seq_id"]),
                name=collective_name(entry),
                shapes=", ".join(f"{str(dtype).lower()}{list(shape)}" for dtype, shape in tensors),
                line=script_line((frame["filename"], frame["line"]) for frame in entry.get("frames", ())),
                finished=bool(entry["retired"]),
            )
            calls.append((call, entry["time_created_ns"] / 1e9))
    return sorted(calls, key=lambda pair: pair[1])


def script_line(frames: Iterable[tuple[str, int]]) -> str:
    """The innermost line of the script. ``""`` for a call inside of backward, which no line of the script makes."""
    return next((f"{file}:{line}" for file, line in frames if file.endswith(".py") and is_script(file)), "")


def first_differences(calls_by_rank: Mapping[int, list[Call]]) -> list[str]:
    """A sentence for the first call of each group that differs between ranks."""
    groups: dict[str, dict[int, dict[int, Call]]] = {}  # group → number → rank → call
    for rank, calls in calls_by_rank.items():
        for call in calls:
            groups.setdefault(call.group, {}).setdefault(call.number, {})[rank] = call
    sentences = []
    for by_number in groups.values():
        for _, by_rank in sorted(by_number.items()):
            first = by_rank[min(by_rank)]
            if not all(first.matches(call) for call in by_rank.values()):
                ranks_by_text: dict[str, list[int]] = {}
                for rank, call in sorted(by_rank.items()):
                    ranks_by_text.setdefault(str(call), []).append(rank)
                calls_text = "; ".join(f"{rank_list(ranks)}: {text}" for text, ranks in ranks_by_text.items())
                sentences.append(f"{first.position} is not the same on all ranks: {calls_text}")
                break
    return sentences


def rank_list(ranks: Iterable[int]) -> str:
    """``rank 1``, ``ranks 0, 2``."""
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


class HangWatch:
    """One rank's look at its own collectives, which reports those that wait longer than `after` seconds.

    `pending_call` gives number, name and begin of the script's call that the ranks compare now, or None. Calls before
    `since`, of a process group that was broken off, never end.
    """

    def __init__(
        self, watch: Watch, after: float, folder: Path, pending_call: Callable[[], tuple[int, str, float] | None]
    ) -> None:
        self._watch, self._after, self._folder, self._pending_call = watch, after, folder, pending_call
        self._rank, self.since = watch.rank, time.time()
        self._mailbox = watch.inbox.clone()
        self._mailbox.post(f"process/{watch.rank}", json.dumps([socket.gethostname(), os.getpid()]).encode())
        self._reported: tuple[str, int] | None = None
        self._report_lines: list[str] = []  # of the present wait: another rank's question writes the file again
        self._asleep_since = 0.0  # when the training thread fell asleep in a message
        self._cpu_seconds = 0.0  # of the training thread
        self._closed = threading.Event()
        watch.told |= {
            "waits": lambda: "yes" if self._waiting_call() else "",
            "calls": lambda: json.dumps(self._write()),
            "pulse": lambda: json.dumps([time.process_time(), watch.told["where"]()]),
        }
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join(5.0)

    # -- this rank ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store is gone, and with it rank 0: the collective fails
            while not self._closed.wait(self._after / LOOKS):
                self._look_at_training_thread()
                waiting = self._waiting_call()
                if waiting is None:
                    self._report_lines = []
                if waiting is not None and (waiting.group, waiting.number) != self._reported:
                    self._reported = waiting.group, waiting.number
                    self._write()
                    if not any(self._ask(rank, "waits") for rank in range(self._rank)):
                        self._report(waiting)

    def _look_at_training_thread(self) -> None:
        """Note since when the training thread sleeps in a message, or in a call of ``wait``."""
        thread = self._watch.training_thread
        frame = sys._current_frames().get(thread)
        clock = getattr(time, "pthread_getcpuclockid", None)
        if frame is None or clock is None:
            return
        file, cpu_seconds_before = frame.f_code.co_filename, self._cpu_seconds
        self._cpu_seconds = time.clock_gettime(clock(thread))
        line = linecache.getline(file, frame.f_lineno or 0)  # None between two lines
        in_message = f"torch{os.sep}distributed{os.sep}" in file or ".wait(" in line
        is_asleep = in_message and self._cpu_seconds - cpu_seconds_before < IDLE
        self._asleep_since = (self._asleep_since or time.time()) if is_asleep else 0.0

    def _message(self) -> Call:
        """The message that the training thread waits for. Its number differs on each rank, so none are compared."""
        frame = sys._current_frames().get(self._watch.training_thread)
        stack = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(frame))
        return Call(MESSAGES, self._rank + 1, "send or receive", "", script_line(stack) if frame else "", False)

    def _recorded(self, active_only: bool) -> list[tuple[Call, float]]:
        calls, pending = recorded_calls(active_only), self._pending_call()
        if pending is not None:
            number, name, begin = pending
            calls.append((Call("the script's calls", number, name, "", "", False), begin))
        if self._asleep_since and all(call.finished for call, _ in calls):
            calls.append((self._message(), self._asleep_since))
        return calls

    def _waiting_call(self) -> Call | None:
        """The oldest call that has waited too long."""
        limit = time.time() - self._after
        calls = self._recorded(active_only=True)
        return next((call for call, begin in calls if self.since < begin < limit and not call.finished), None)

    def _write(self) -> list[Call]:
        """Write ``hang-<rank>.json``; returns this rank's calls."""
        calls = [call for call, _ in self._recorded(active_only=False)]
        facts: dict[str, Any] = {"report": self._report_lines} if self._report_lines else {}
        facts |= {"rank": self._rank, "time": time.time(), "at": self._watch.told["where"]()}
        facts["calls"] = [call._asdict() for call in calls]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"hang-{self._rank}.json").write_text(json.dumps(facts, indent=1))
        except OSError as error:
            logger.warning("hang-%d.json cannot be written: %s", self._rank, error, main_process_only=False)
        return calls

    # -- all ranks ----------------------------------------------------------------------------------------------------

    def _report(self, waiting: Call) -> None:
        own_calls = [call for call, _ in self._recorded(active_only=False)]
        calls_by_rank, states = {self._rank: own_calls}, dict[int, str]()
        for rank in range(self._watch.size):
            if rank != self._rank:
                if answer := self._ask(rank, "calls"):
                    calls_by_rank[rank] = [Call(*call) for call in json.loads(answer)]
                else:
                    states[rank] = self._state_of_silent(rank)
        differences = first_differences(calls_by_rank)
        waiting_by_rank: dict[int, Call] = {}  # the oldest call of a rank that it has not finished
        for rank, calls in calls_by_rank.items():
            for call in calls:
                if not call.finished:
                    waiting_by_rank.setdefault(rank, call)
        if not differences:  # some ranks have not come so far
            own_keys = {(call.group, call.number) for call in own_calls}
            states |= {rank: self._state_of_busy(rank) for rank in calls_by_rank.keys() - waiting_by_rank.keys()}
            for rank, call in waiting_by_rank.items():
                if (call.group, call.number) not in own_keys:
                    states[rank] = f"waits in another call: {call}"
        with_line = next((call for call in own_calls if call[:2] == waiting[:2]), waiting)
        have = "has" if len(waiting_by_rank) == 1 else "have"
        waiting_ranks = f"{rank_list(waiting_by_rank)} {have} waited for {self._after:g} s"
        sentences = [
            f"{waiting_ranks}, rank {self._rank} in {with_line.position}, {with_line}",
            *differences,
            *(f"rank {rank} {state}" for rank, state in sorted(states.items())),
        ]
        self._report_lines = sentences
        self._write()
        files = self._folder / "hang-<rank>.json"
        text = ".\n  ".join(sentences)
        logger.warning("%s. The calls of each rank are in %s.", text, files, main_process_only=False)

    def _ask(self, rank: int, question: str) -> str:
        return self._watch.ask(rank, question, self._mailbox, PATIENCE)

    def _state_of_busy(self, rank: int) -> str:
        """The line at which a rank runs that waits for no collective, and whether it moves on."""
        answer_before = self._ask(rank, "pulse")
        time.sleep(PULSE)
        answer = self._ask(rank, "pulse")
        if not answer_before or not answer:
            return self._state_of_silent(rank)
        (seconds_before, location_before), (seconds, location) = json.loads(answer_before), json.loads(answer)
        moves = location != location_before or seconds - seconds_before > BUSY
        return f"has not come to it, and {'still moves' if moves else 'stands still'}: {location}"

    def _state_of_silent(self, rank: int) -> str:
        """Why a rank does not answer, as far as this machine can tell."""
        host, process = json.loads(self._mailbox.read(f"process/{rank}"))
        if host != socket.gethostname():
            return f"does not answer: process {process} on {host} has ended, was killed, or is stopped"
        import psutil  # slow to import, and most runs do not hang

        try:
            status = psutil.Process(process).status()
        except psutil.NoSuchProcess:
            return f"has ended or was killed: process {process}"
        return f"{'' if status == psutil.STATUS_STOPPED else 'does not answer, and '}is {status}: process {process}"
