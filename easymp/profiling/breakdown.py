"""Where the time of recorded steps went: each moment of them belongs to one phase.

Where the host computes, a moment belongs to the phase that the main thread is in; to communication if a collective is under way and no
operation runs, outside of the loader: that is what communication costs, waiting for slower ranks included. What of a collective runs
beside operations costs nothing, and is counted apart.

Where a device computes, a moment belongs to the phase whose kernel runs (the phase in which the host launched it); else to
communication if a collective's kernel runs; else to the phase whose copy runs; else the device is idle, and the moment belongs to the
phase that the host is in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from .intervals import Stretch, common, length, union, without
from .phases import COMMUNICATION, DATA, OTHER, Mark, timeline
from .recording import Allocation, Kernel, Recording

PAUSE = 100_000  # ns between two operations that are the host's own way from one to the next, and not waiting


@dataclass
class Breakdown:
    """What steps of one rank took.

    Attributes:
        rank: whose.
        device: what computed.
        steps: how long each took, in ns.
        time: of all steps together, by phase, in ns.
        idle: of that, what the device was idle; empty where the host computes.
        hidden: ns in which a collective was under way behind computation.
        peak: bytes, at most, by phase; empty where memory was not recorded. Of a device all that was allocated, of the host what was
            beyond the beginning of the recording.
    """

    rank: int
    device: str
    steps: list[int] = field(default_factory=list)
    time: dict[str, int] = field(default_factory=dict)
    idle: dict[str, int] = field(default_factory=dict)
    hidden: int = 0
    peak: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.time.values())

    @property
    def step(self) -> float:
        """ns a step."""
        return self.total / max(1, len(self.steps))

    def each(self, phase: str) -> float:
        """ns of a phase a step."""
        return self.time.get(phase, 0) / max(1, len(self.steps))

    def share(self, phase: str) -> float:
        return self.time.get(phase, 0) / self.total if self.total else 0.0

    @property
    def own(self) -> float:
        """ns a step in which this rank waited for no collective."""
        return self.step - self.each(COMMUNICATION)

    def add(self, recording: Recording, base: int = 0) -> None:
        """Count another cycle in.

        Args:
            base: bytes that were allocated when it began.
        """
        parts = timeline(recording.marks, recording.begin, recording.end)
        self.steps += recording.steps
        time, idle, hidden = _on_device(recording, parts) if recording.kernels else _on_host(recording, parts)
        for mine, new in ((self.time, time), (self.idle, idle)):
            for phase, ns in new.items():
                mine[phase] = mine.get(phase, 0) + ns
        self.hidden += hidden
        for phase, most in peaks(parts, recording.allocations, base).items():
            self.peak[phase] = max(self.peak.get(phase, 0), most)


Parts = dict[str, list[Stretch]]


def _by_phase(parts: Sequence[Mark]) -> Parts:
    found: Parts = {}
    for begin, end, phase in parts:
        found.setdefault(phase, []).append((begin, end))
    return found


def _on_host(recording: Recording, parts: Sequence[Mark]) -> tuple[dict[str, int], dict[str, int], int]:
    phases = _by_phase(parts)
    window = [(recording.begin, recording.end)]
    flights = common(recording.flights, window)
    working = union(recording.working, PAUSE)
    waiting = without(without(flights, working), phases.get(DATA, []))
    time = {phase: length(without(stretches, waiting)) for phase, stretches in phases.items()}
    if waiting:
        time[COMMUNICATION] = time.get(COMMUNICATION, 0) + length(waiting)
    return time, {}, length(common(flights, working))


def _on_device(recording: Recording, parts: Sequence[Mark]) -> tuple[dict[str, int], dict[str, int], int]:
    window = [(recording.begin, recording.end)]
    begins = [part.begin for part in parts]

    def phase_of(kernel: Kernel) -> str:
        if kernel.launched is None or not recording.begin <= kernel.launched < recording.end:
            return OTHER
        return parts[bisect_right(begins, kernel.launched) - 1].phase

    kinds = {
        kind: [k for k in recording.kernels if k.kind == kind] for kind in ("work", "collective", "copy")
    }
    work = common(union((k.begin, k.end) for k in kinds["work"]), window)
    collectives = common(union((k.begin, k.end) for k in kinds["collective"]), window)
    waiting = without(collectives, work)
    time = {COMMUNICATION: length(waiting)} if waiting else {}
    taken = waiting
    for kernels in (kinds["work"], kinds["copy"]):
        launched: Parts = {}
        until = 0
        for kernel in kernels:  # of two at a time, the one that began first
            if kernel.end > until:
                launched.setdefault(phase_of(kernel), []).append((max(kernel.begin, until), kernel.end))
                until = kernel.end
        for phase, stretches in launched.items():
            time[phase] = time.get(phase, 0) + length(without(common(stretches, window), taken))
        taken = union([*taken, *common(union((k.begin, k.end) for k in kernels), window)])
    free = without(window, taken)
    idle = {
        phase: ns for phase, stretches in _by_phase(parts).items() if (ns := length(common(stretches, free)))
    }
    for phase, ns in idle.items():
        time[phase] = time.get(phase, 0) + ns
    return time, idle, length(collectives) - length(waiting)


def peaks(parts: Sequence[Mark], allocations: Sequence[Allocation], base: int) -> dict[str, int]:
    """The most bytes that there were in each phase; empty without allocations."""
    most: dict[str, int] = {}
    if not allocations:
        return most
    there, i = base, 0
    for begin, end, phase in parts:
        while i < len(allocations) and allocations[i].at < begin:
            there += allocations[i].bytes
            i += 1
        most[phase] = max(most.get(phase, 0), there)
        while i < len(allocations) and allocations[i].at < end:
            there += allocations[i].bytes
            most[phase] = max(most[phase], there)
            i += 1
    return most
