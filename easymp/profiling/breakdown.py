"""The time of recorded steps by phase, as a table and sentences. Each moment belongs to one phase.

Where the host computes, a moment belongs to the phase of the main thread; to communication if a collective is under way and no
operation runs, outside of the loader: this is the cost of communication, with waiting for slower ranks. A collective that runs beside
operations costs nothing, and is counted apart.

Where a device computes, a moment belongs to the phase of the kernel that runs (the phase in which the host launched it); else to
communication if a collective's kernel runs; else to the phase of the copy that runs; else the device is idle, and the moment belongs
to the phase of the host.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ..base.units import columns, size
from .events import (
    BACKWARD,
    COMMUNICATION,
    DATA,
    FORWARD,
    LOSS,
    OPTIMIZER,
    OTHER,
    PHASES,
    Interval,
    Mark,
    Recording,
    common,
    length,
    union,
    without,
)

PAUSE = 100_000  # ns between two operations that are the host's own way from one to the next, and not waiting
ROWS = 8  # ranks with a line of their own

# Shares of a step above which a cause of waiting gets a sentence.
WAITS, COMMUNICATES, IDLES, STEPS, SCRIPT = 0.1, 0.15, 0.25, 0.25, 0.25
APART = 0.1  # of a step, by which ranks differ
UNLIKE = 2  # times the shortest step


@dataclass
class Breakdown:
    """Time and memory of one rank's steps.

    Attributes:
        rank: the rank.
        device: the device that computed.
        steps: duration of each step in ns.
        time: ns of all steps together, by phase.
        idle: the device's idle part of it; empty where the host computes.
        hidden: ns in which a collective ran beside computation.
        peak: the most bytes, by phase; empty if memory was not recorded. A device's peak is all that was allocated; the host's is
            relative to the beginning of the recording.
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

    def a_step(self, ns: int) -> float:
        """The average of `ns` of all steps."""
        return ns / max(1, len(self.steps))

    @property
    def step(self) -> float:
        """ns a step."""
        return self.a_step(self.total)

    def each(self, phase: str) -> float:
        """ns of a phase a step."""
        return self.a_step(self.time.get(phase, 0))

    def share(self, phase: str) -> float:
        """Share of a phase in all steps, from 0 to 1."""
        return self.time.get(phase, 0) / self.total if self.total else 0.0

    @property
    def own(self) -> float:
        """Time per step, in ns, in which this rank did not wait for a collective."""
        return self.step - self.each(COMMUNICATION)

    def add(self, recording: Recording, base: int = 0) -> None:
        """Add another cycle that began with `base` bytes allocated."""
        parts = timeline(recording.marks, recording.begin, recording.end)
        self.steps += recording.steps
        time, idle, hidden = _on_device(recording, parts) if recording.kernels else _on_host(recording, parts)
        _add(self.time, time)
        _add(self.idle, idle)
        self.hidden += hidden
        for phase, most in peaks(parts, recording.allocations, base).items():
            self.peak[phase] = max(self.peak.get(phase, 0), most)


# -- moments to phases -------------------------------------------------------------------------------------------------

Times = dict[str, int]  # ns by phase


def timeline(marks: Iterable[Mark], begin: int, end: int) -> list[Mark]:
    """`begin` to `end` without a gap, each part in one phase.

    The innermost of nested marks decides, as when an optimizer calls a closure. Time without a mark is the script's; between a model's
    call and the next backward it is the loss.
    """
    parts = []
    at = begin
    for mark in _innermost(marks):
        if mark.end > max(at, mark.begin) and mark.begin < end:
            parts += [Mark(at, mark.begin, OTHER)] if mark.begin > at else []
            parts.append(Mark(max(mark.begin, at), min(mark.end, end), mark.phase))
            at = parts[-1].end
    parts += [Mark(at, end, OTHER)] if at < end else []
    loss: list[int] | None = None  # the script's own parts since a forward, unless a batch came in between
    for i, part in enumerate(parts):
        if part.phase == FORWARD:
            loss = loss or []
        elif part.phase in (BACKWARD, DATA):
            for j in loss or () if part.phase == BACKWARD else ():
                parts[j] = parts[j]._replace(phase=LOSS)
            loss = None
        elif part.phase == OTHER and loss is not None:
            loss.append(i)
    return parts


def _innermost(marks: Iterable[Mark]) -> Iterator[Mark]:
    """Convert properly nested marks of one thread into intervals that do not overlap."""
    stack: list[Mark] = []
    at = 0
    never = Mark(1 << 63, 1 << 63, OTHER)
    for mark in (*sorted(marks, key=lambda m: (m.begin, -m.end)), never):
        while stack and stack[-1].end <= mark.begin:
            done = stack.pop()
            yield Mark(at, done.end, done.phase)
            at = done.end
        if stack:
            yield Mark(at, mark.begin, stack[-1].phase)
        stack.append(mark)
        at = mark.begin


def _by_phase(parts: Iterable[Mark]) -> dict[str, list[Interval]]:
    found: dict[str, list[Interval]] = {}
    for begin, end, phase in parts:
        found.setdefault(phase, []).append((begin, end))
    return found


def _on_host(recording: Recording, parts: Sequence[Mark]) -> tuple[Times, Times, int]:
    """Time by phase, idle time by phase (none), and hidden time."""
    phases = _by_phase(parts)
    flights = common(recording.flights, [(recording.begin, recording.end)])
    working = union(recording.working, PAUSE)
    waiting = without(without(flights, working), phases.get(DATA, []))
    time = {phase: length(without(held, waiting)) for phase, held in phases.items()}
    if waiting:
        time[COMMUNICATION] = time.get(COMMUNICATION, 0) + length(waiting)
    return time, {}, length(common(flights, working))


def _on_device(recording: Recording, parts: Sequence[Mark]) -> tuple[Times, Times, int]:
    """Time by phase, idle time by phase, and hidden time."""
    free = [(recording.begin, recording.end)]  # moments that no phase has yet
    begins = [part.begin for part in parts]
    hidden = 0

    def phase_of(launched: int | None) -> str:
        if launched is None or not recording.begin <= launched < recording.end:
            return OTHER
        return parts[bisect_right(begins, launched) - 1].phase

    def take(by_phase: dict[str, list[Interval]]) -> Times:
        """Assign the free moments among these to each phase."""
        nonlocal free
        taken = {phase: common(held, free) for phase, held in by_phase.items()}
        free = without(free, union(interval for held in taken.values() for interval in held))
        return {phase: length(held) for phase, held in taken.items() if held}

    time: Times = {}
    for kind in ("work", "collective", "copy"):
        ran: list[Mark] = []
        until = recording.begin
        for kernel in recording.kernels:  # of two that run at a time, the first to begin counts
            if kernel.kind == kind and min(kernel.end, recording.end) > until:
                phase = COMMUNICATION if kind == "collective" else phase_of(kernel.launched)
                ran.append(Mark(max(kernel.begin, until), min(kernel.end, recording.end), phase))
                until = kernel.end
        new = take(_by_phase(ran))
        if kind == "collective":
            hidden = length((mark.begin, mark.end) for mark in ran) - new.get(COMMUNICATION, 0)
        _add(time, new)
    idle = take(_by_phase(parts))
    _add(time, idle)
    return time, idle, hidden


def _add(times: Times, more: Times) -> None:
    for phase, ns in more.items():
        times[phase] = times.get(phase, 0) + ns


def peaks(parts: Sequence[Mark], allocations: Sequence[tuple[int, int]], base: int) -> dict[str, int]:
    """The largest number of bytes in each phase; empty without allocations."""
    most: dict[str, int] = {}
    there, i = base, 0
    for begin, end, phase in parts if allocations else ():
        while i < len(allocations) and allocations[i][0] < begin:
            there += allocations[i][1]
            i += 1
        most[phase] = max(most.get(phase, 0), there)
        while i < len(allocations) and allocations[i][0] < end:
            there += allocations[i][1]
            most[phase] = max(most[phase], there)
            i += 1
    return most


# -- in words ----------------------------------------------------------------------------------------------------------


def table(own: Breakdown) -> str:
    """One rank's phases: ms a step, share, the device's idle part, and peak memory."""
    head = ["phase", "ms a step", "share", f"{own.device} idle", "peak memory"]
    shown = [True, True, True, bool(own.idle), bool(own.peak)]
    rows = [head]
    for phase in PHASES:
        if own.time.get(phase, 0) or own.peak.get(phase, 0):
            idle, peak = _ms(own.a_step(own.idle.get(phase, 0))), own.peak.get(phase)
            rows.append([phase, _ms(own.each(phase)), percent(own.share(phase)), idle])
            rows[-1].append("" if peak is None else size(peak))
    idle, peak = _ms(own.a_step(sum(own.idle.values()))), size(max(own.peak.values(), default=0))
    rows.append(["a step", _ms(own.step), "100 %", idle, peak])
    return "\n".join(columns([[cell for cell, there in zip(row, shown) if there] for row in rows]))


def of_ranks(ranks: Sequence[Breakdown]) -> str:
    """One line for each rank; for many ranks, only the slowest ones and the fastest."""
    rows = [["rank", "ms a step", "own work", "communication", "data wait"]]
    shown = list(ranks)
    if len(ranks) > ROWS:
        by_work = sorted(ranks, key=lambda r: -r.own)
        shown = sorted([*by_work[: ROWS - 1], by_work[-1]], key=lambda r: r.rank)
    for r in shown:
        rows.append([str(r.rank), *map(_ms, (r.step, r.own, r.each(COMMUNICATION), r.each(DATA)))])
    if len(shown) < len(ranks):
        rows.append([f"and {len(ranks) - len(shown)} more", "", "", "", ""])
    return "\n".join(columns(rows))


def sentences(own: Breakdown, ranks: Sequence[Breakdown] = (), workers: int | None = None) -> list[str]:
    """A sentence for each large cause of waiting; the figure is in the table. `workers` is None without loaders."""
    if not own.total:
        return []
    biggest = max(own.time, key=own.time.__getitem__)
    said = [f"{percent(own.share(biggest))} of the step is {_named(biggest)}."]
    if own.share(DATA) >= WAITS:
        cure = (
            f"more workers (num_workers={workers} now) or less work a sample would help"
            if workers
            else "num_workers=2 or more reads ahead while the step computes"
        )
        said.append(f"The loader makes the step wait {ms(own.each(DATA))}: {cure}.")
    if own.share(COMMUNICATION) >= COMMUNICATES:
        behind = own.a_step(own.hidden)
        more = f"; {ms(behind)} more of it pass behind computation" if behind >= 0.01 * own.step else ""
        said.append(
            f"Communication, with waiting for other ranks, holds the step up for {ms(own.each(COMMUNICATION))}{more}: with larger "
            "batches a rank, or accumulation, fewer steps pay for it."
        )
    idle = sum(own.idle.values())
    if idle >= IDLES * own.total:
        phase = max(own.idle, key=own.idle.__getitem__)
        said.append(
            f"{own.device} is idle for {ms(own.a_step(idle))} of the step, the most in {_named(phase)}: the host does not "
            "keep it busy; larger batches or compile=True give it more to do at a time."
        )
    if own.share(OPTIMIZER) >= STEPS:
        said.append(
            f"The optimizer takes {ms(own.each(OPTIMIZER))} at any batch size: larger batches or accumulation step less often."
        )
    if own.share(OTHER) >= SCRIPT:
        said.append(f"{ms(own.each(OTHER))} of the step are the script's own work, such as logging.")
    longest, shortest = max(own.steps), min(own.steps)
    if shortest * UNLIKE < longest:
        said.append(f"The steps are not alike: the longest took {ms(longest)}, the shortest {ms(shortest)}.")
    return [*said, *straggler(ranks)]


def straggler(ranks: Sequence[Breakdown]) -> list[str]:
    """A sentence that names the rank for which the others wait; None if there is none."""
    if len(ranks) < 2:
        return []
    slow, fast = max(ranks, key=lambda r: r.own), min(ranks, key=lambda r: r.own)
    if slow.own - fast.own < APART * slow.step:
        return []
    why = " (its loader)" if slow.each(DATA) - fast.each(DATA) > (slow.own - fast.own) / 2 else ""
    work = f"{ms(slow.own)} of its own work a step, rank {fast.rank} only {ms(fast.own)}"
    return [f"Rank {slow.rank} is the slowest{why}: {work}: the others wait for it."]


def durations(steps: Sequence[int]) -> str:
    """``"3 steps of 91.2, 92.0 and 90.8 ms"``."""
    unit, ns = ("µs", 1e3) if max(steps) < 1e6 else ("ms", 1e6)
    each = [f"{step / ns:.1f}" for step in steps]
    if len(each) == 1:
        return f"1 step of {each[0]} {unit}"
    if len(each) > 5:
        return f"{len(each)} steps of {min(each, key=float)} to {max(each, key=float)} {unit}"
    return f"{len(each)} steps of {', '.join(each[:-1])} and {each[-1]} {unit}"


def ms(ns: float) -> str:
    return f"{ns / 1e6:.1f} ms" if ns >= 1e5 else f"{ns / 1e3:.0f} µs"


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.2f}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _named(phase: str) -> str:
    return "the script's own" if phase == OTHER else phase
