"""Names the collective at which ranks differ, while they wait for one another and before the timeout ends the run.

A thread of each rank looks at torch's flight recorder, which holds the last collectives of NCCL and gloo with the lines that called
them. Where one has waited for ``hang_after`` seconds, the lowest rank that waits asks the others for theirs, and compares. Messages
between two ranks (send and recv) are not in gloo's recorder: there the stack and processor time of the script's thread tell that it
sleeps in one.
"""

from __future__ import annotations

import json
import linecache
import os
import pickle  # of bytes that this process's torch has just made
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from ..logging import get_logger
from .hang_report import RECORDERS, Watch

logger = get_logger(__name__)
HANG = "easymp-hang"  # name of the thread
LAST = 256  # collectives that each rank remembers
LOOKS = 8  # looks at the recorder in `hang_after` seconds
PATIENCE = timedelta(seconds=15)  # for an answer: the first look at lines takes torch seconds
PAUSE = 1.0  # seconds between two looks at a rank that does not wait
BUSY = 0.05  # seconds of processor time within them that say that it works
MESSAGES = "messages between two ranks"
IDLE = 0.001  # seconds of processor time between two looks at a thread that sleeps
# Their shapes are the same on all ranks; of others the roots have more, or each rank has its own.
ALIKE = ("all_reduce", "broadcast", "reduce_scatter", "allgather_base", "_all_gather_base")
OTHERS = (str(Path(__file__).parent.parent), str(Path(threading.__file__).parent))  # easymp and Python


class Call(NamedTuple):
    """One collective of one rank, as its recorder has it."""

    group: str
    number: int  # in the group, from 1
    name: str
    shapes: str
    line: str
    done: bool

    def __str__(self) -> str:
        called = f"{self.name}({self.shapes})" if self.shapes else self.name
        return f"{called} at {self.line}" if self.line else called

    @property
    def place(self) -> str:
        """Its number and group in words."""
        return "a message" if self.group == MESSAGES else f"call {self.number} of {self.group}"

    def same(self, other: Call) -> bool:
        """Whether two ranks' calls of one number fit together."""
        return self.name == other.name and (self.name not in ALIKE or self.shapes == other.shapes)


def recorded(frames: bool) -> list[tuple[Call, float]]:
    """The collectives in this rank's recorders and when each began, in seconds since 1970, the oldest first.

    Without `frames` the calls have no lines, and old ones that have ended are left out.
    """
    found = []
    for name in RECORDERS:
        dump = getattr(torch._C._distributed_c10d, name if not frames else name.removesuffix("_json"), None)
        if dump is None:
            continue
        read = pickle.loads if frames else json.loads
        for entry in read(dump(True, True) if not frames else dump(True, True, False)).get("entries", []):
            if not entry["is_p2p"]:
                tensors = zip(entry["input_dtypes"], entry["input_sizes"])
                shapes = (f"{str(dtype).lower()}{list(shape)}" for dtype, shape in tensors)
                call = Call(
                    "group {} ({})".format(*entry["process_group"]),
                    int(entry["collective_seq_id"]),
                    str(entry["profiling_name"]).split(":")[-1],
                    ", ".join(shapes),
                    _line(entry.get("frames", ())),
                    bool(entry["retired"]),
                )
                found.append((call, entry["time_created_ns"] / 1e9))
    return sorted(found, key=lambda pair: pair[1])


def _line(frames: Iterable[Mapping[str, Any]]) -> str:
    """The script's line; of a call inside of backward, which no line of the script makes, nothing."""
    for frame in frames:
        file = str(frame["filename"])
        if file.endswith(".py") and "site-packages" not in file and not file.startswith(OTHERS):
            return f"{file}:{frame['line']}"
    return ""


def differences(rings: Mapping[int, list[Call]]) -> tuple[list[str], dict[int, Call]]:
    """Compare the calls of ranks that wait.

    Args:
        rings: rank → its calls, the oldest first.

    Returns:
        A sentence for the first call of each group that differs, and rank → the call in which it waits for others, where no call differs.
    """
    groups: dict[str, dict[int, dict[int, Call]]] = {}
    for rank, ring in rings.items():
        for call in ring:
            groups.setdefault(call.group, {}).setdefault(call.number, {})[rank] = call
    sentences = []
    for numbers in groups.values():
        for number in sorted(numbers):
            there = numbers[number]
            first = there[min(there)]
            if not all(first.same(call) for call in there.values()):
                kinds: dict[str, list[int]] = {}
                for rank, call in sorted(there.items()):
                    kinds.setdefault(str(call), []).append(rank)
                said = "; ".join(f"{ranks(who)}: {call}" for call, who in kinds.items())
                sentences.append(f"{first.place} is not the same on all ranks: {said}")
                break
    waiting = {rank: next((c for c in ring if not c.done), None) for rank, ring in rings.items()}
    return sentences, {rank: call for rank, call in waiting.items() if call is not None}


def ranks(numbers: Iterable[int]) -> str:
    """Ranks in words: ``rank 1``, ``ranks 0, 2``."""
    listed = sorted(numbers)
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"


class HangWatch:
    """One rank's look at its own collectives. `close` ends it.

    Args:
        watch: by which ranks ask one another.
        store: of all ranks, which has their processes.
        after: seconds for which a collective waits before it is reported.
        folder: of ``hang-<rank>.json``.
        meeting: number and name of the script's call that the ranks compare in the store, and when that began; None without one.

    Attributes:
        since: when the process group began: calls of an earlier one that was broken off never end.
    """

    def __init__(
        self,
        watch: Watch,
        store: dist.Store,
        after: float,
        folder: Path,
        meeting: Callable[[], tuple[int, str, float] | None],
    ) -> None:
        self._watch, self._store, self._after = watch, store, after
        self._folder, self._meeting = folder, meeting
        self._rank, self._size, self.since = watch.rank, watch.size, time.time()
        self._said: tuple[str, int] | None = None
        self._asleep = self._worked = 0.0  # when the script's thread fell asleep in a message; processor time
        self._over = threading.Event()
        store.set(f"process/{watch.rank}", f"{socket.gethostname()} {os.getpid()}")
        watch.told |= {
            "waits": lambda: "yes" if self._waiting() else "",
            "calls": self._calls,
            "pulse": lambda: json.dumps([sum(psutil.Process().cpu_times()[:2]), watch.told["where"]()]),
        }
        self._thread = threading.Thread(target=self._run, name=HANG, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join(5.0)

    # -- this rank ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._over.wait(self._after / LOOKS):
                self._look()
                waiting = self._waiting()
                if waiting is not None and (waiting.group, waiting.number) != self._said:
                    self._said = waiting.group, waiting.number
                    self._write({})
                    if not any(self._ask(rank, "waits") for rank in range(self._rank)):
                        self._report(waiting)
        except RuntimeError:
            return  # the store is gone, and with it rank 0: the collective fails

    def _look(self) -> None:
        """See whether the script's thread sleeps in a message, or in a call of ``wait``."""
        frame = sys._current_frames().get(self._watch.trains)
        clock = getattr(time, "pthread_getcpuclockid", None)
        if frame is None or clock is None:
            return
        file, before = frame.f_code.co_filename, self._worked
        self._worked = time.clock_gettime(clock(self._watch.trains))
        line = linecache.getline(file, frame.f_lineno or 0)  # None between two lines
        inside = f"torch{os.sep}distributed{os.sep}" in file or ".wait(" in line
        sleeps = inside and self._worked - before < IDLE
        self._asleep = (self._asleep or time.time()) if sleeps else 0.0

    def _message(self) -> Call:
        """The message that the script's thread waits for; each rank's has another number, for there is nothing to compare."""
        frame = sys._current_frames().get(self._watch.trains)
        stack = ({"filename": f.f_code.co_filename, "line": line} for f, line in traceback.walk_stack(frame))
        return Call(MESSAGES, self._rank + 1, "send or receive", "", _line(stack) if frame else "", False)

    def _waiting(self) -> Call | None:
        """The oldest call that has waited too long."""
        late = time.time() - self._after
        old = (call for call, began in self._recorded(frames=False) if self.since < began < late)
        return next((call for call in old if not call.done), None)

    def _recorded(self, frames: bool) -> list[tuple[Call, float]]:
        found, meeting = recorded(frames), self._meeting()
        if meeting is not None:
            number, name, began = meeting
            found.append((Call("the script's calls", number, name, "", "", False), began))
        if self._asleep and all(call.done for call, _ in found):
            found.append((self._message(), self._asleep))
        return found

    def _ring(self) -> list[Call]:
        return [call for call, _ in self._recorded(frames=True)]

    def _calls(self) -> str:
        self._write({})
        return json.dumps(self._ring())

    def _write(self, more: dict[str, Any]) -> None:
        facts = {"rank": self._rank, "time": time.time(), "at": self._watch.told["where"](), **more}
        facts["calls"] = [call._asdict() for call in self._ring()]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"hang-{self._rank}.json").write_text(json.dumps(facts, indent=1))
        except OSError as error:
            logger.warning("hang-%d.json cannot be written: %s", self._rank, error, main_process_only=False)

    # -- all ranks ----------------------------------------------------------------------------------------------------

    def _report(self, waiting: Call) -> None:
        rings, states = {self._rank: self._ring()}, dict[int, str]()
        for rank in range(self._size):
            if rank != self._rank:
                if answer := self._ask(rank, "calls"):
                    rings[rank] = [Call(*call) for call in json.loads(answer)]
                else:
                    states[rank] = self._silent(rank)
        sentences, waits = differences(rings)
        if not sentences:  # some ranks have not come so far
            made = {(call.group, call.number) for call in rings[self._rank]}
            states |= {rank: self._moving(rank) for rank in rings.keys() - waits.keys()}
            for rank, call in waits.items():
                if (call.group, call.number) not in made:
                    states[rank] = f"waits in another call: {call}"
        mine = next((call for call in rings[self._rank] if call[:2] == waiting[:2]), waiting)
        begin = f"{ranks(waits)} {'has' if len(waits) == 1 else 'have'} waited for {self._after:g} s"
        lines = [
            f"{begin}, rank {self._rank} in {mine.place}, {mine}",
            *sentences,
            *(f"rank {rank} {state}" for rank, state in sorted(states.items())),
        ]
        self._write({"report": lines})
        where = f"The calls of each rank are in {self._folder / 'hang-<rank>.json'}."
        logger.warning("%s. %s", ".\n  ".join(lines), where, main_process_only=False)

    def _moving(self, rank: int) -> str:
        """Where a rank is that does not wait, and whether it moves."""
        first = self._ask(rank, "pulse")
        time.sleep(PAUSE)
        second = self._ask(rank, "pulse")
        if not first or not second:
            return self._silent(rank)
        (worked, before), (works, now) = json.loads(first), json.loads(second)
        moves = now != before or works - worked > BUSY
        return f"has not come to it, and {'still moves' if moves else 'stands still'}: {now}"

    def _ask(self, rank: int, word: str) -> str:
        return self._watch.ask(rank, word, self._watch.beside, PATIENCE)

    def _silent(self, rank: int) -> str:
        """Why a rank does not answer, as far as this machine can tell."""
        host, number = self._store.get(f"process/{rank}").decode().rsplit(" ", 1)
        if host != socket.gethostname():
            return f"does not answer: process {number} on {host} has ended, was killed, or is stopped"
        try:
            status = psutil.Process(int(number)).status()
            return f"{'' if status == psutil.STATUS_STOPPED else 'does not answer, and '}is {status}: process {number}"
        except psutil.NoSuchProcess:
            return f"has ended or was killed: process {number}"
