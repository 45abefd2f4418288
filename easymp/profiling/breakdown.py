"""The time of recorded steps by phase, as a table and sentences. Each moment belongs to one phase.

Where the host computes, a moment belongs to the phase of the main thread; to communication if a collective is under way and no
operation runs, outside of the loader: this is the cost of communication, with waiting for slower ranks. A collective that runs beside
operations costs nothing, and is counted apart.

Where a device computes, a moment belongs to the phase of the kernel that runs (the phase in which the host launched it); else to
communication if a collective's kernel runs; else to the phase of the copy that runs; else the device is idle, and the moment belongs
to the phase of the host.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..base.units import columns, size

PREFIX = "easymp: "  # of marks in a trace
DATA, FORWARD, LOSS, BACKWARD, OPTIMIZER = "data wait", "forward", "loss", "backward", "optimizer"
COMMUNICATION, NO_GRAD, OTHER = "communication", "forward, no grad", "other"
PHASES = (DATA, FORWARD, LOSS, BACKWARD, COMMUNICATION, OPTIMIZER, NO_GRAD, OTHER)  # in the order of a table

STEP = "ProfilerStep#"
MEMORY = "[memory]"
ANNOTATION, BACKWARD_NODE = 7, 1  # torch's RecordScope.USER_SCOPE and BACKWARD_FUNCTION
# Annotations that are work: torch.compile's regions, whose loops torch does not record as operations.
COMPILED = ("Torch-Compiled Region", "## Call CompiledFxGraph")
ENGINE = "autograd::engine::evaluate_function"
# Operations that launch collectives or wait for them, and the backends' names of running collectives.
COLLECTIVE = re.compile(r"^(c10d::|_c10d_functional|record_param_comms|(gloo|nccl|mpi|ucc|xccl):)")
UNDER_WAY = re.compile(r"^(gloo|mpi|ucc):")
COLLECTIVE_KERNEL = re.compile(r"nccl|rccl|oneccl|xccl", re.IGNORECASE)
COPY = re.compile(r"^mem(cpy|set)", re.IGNORECASE)
PAUSE = 100_000  # ns between two operations that are the host's own way from one to the next, and not waiting
ROWS = 8  # ranks with a line of their own

# Shares of a step above which a cause of waiting gets a sentence.
WAITS, COMMUNICATES, IDLES, STEPS, SCRIPT = 0.1, 0.15, 0.25, 0.25, 0.25
APART = 0.1  # of a step, by which ranks differ
UNLIKE = 2  # times the shortest step

Interval = tuple[int, int]


class Mark(NamedTuple):
    """An interval (ns) of the main thread in `phase`."""

    begin: int
    end: int
    phase: str


class Kernel(NamedTuple):
    """An interval (ns) of the device."""

    begin: int
    end: int
    launched: int | None  # when the host called its operation; None: not in the recording
    kind: str  # "work", "copy" or "collective"


class Recording(NamedTuple):
    """One cycle; times in ns."""

    begin: int  # of the complete steps; of all events, if no step was complete
    end: int
    steps: list[int]  # the duration of each step
    marks: list[Mark]  # of the main thread
    flights: list[Interval]  # collectives of the host that are under way
    working: list[Interval]  # operations without collectives, on the threads that compute
    kernels: list[Kernel]  # of the busiest device, by time; none: the host computes
    device: int  # its index; -1: the host
    allocations: list[tuple[int, int]]  # time, and bytes (negative: freed) there


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

    def each(self, phase: str) -> float:
        """ns of a phase a step."""
        return self.a_step(self.time.get(phase, 0))

    def share(self, phase: str) -> float:
        """Share of a phase in all steps, from 0 to 1."""
        return self.time.get(phase, 0) / self.total if self.total else 0.0

    @property
    def own(self) -> float:
        """ns a step in which this rank did not wait for a collective."""
        return self.a_step(self.total) - self.each(COMMUNICATION)

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


# -- intervals: sorted lists of (begin, end) that do not touch ---------------------------------------------------------


def union(intervals: Iterable[Interval], gap: int = 0) -> list[Interval]:
    """Sort and merge intervals; those at most `gap` apart become one."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1] + gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def without(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """The parts of `a` that are not in `b`."""
    left: list[Interval] = []
    j = 0
    for begin, end in a:
        while j < len(b) and b[j][1] <= begin:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            if b[k][0] > begin:
                left.append((begin, b[k][0]))
            begin = max(begin, b[k][1])
            k += 1
        if begin < end:
            left.append((begin, end))
    return left


def common(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """The parts that are in both."""
    return without(a, without(a, b))


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - begin for begin, end in intervals)


# -- kineto's events ---------------------------------------------------------------------------------------------------


def read(events: Iterable[Any], steps: Collection[str]) -> Recording:
    """A recording from kineto's events; `steps` are names of the complete steps, such as ``"ProfilerStep#2"``."""
    everything = [e for e in events if e.end_ns() >= e.start_ns()]
    rest = [e for e in everything if e.name() != MEMORY]
    here = [e for e in rest if e.device_type().name == "CPU"]
    annotated = {e.name() for e in here if e.scope() == ANNOTATION}  # the device's rows repeat them
    there = [e for e in rest if e.device_type().name != "CPU" and e.name() not in annotated]
    kernels, device = _kernels(there, here)
    complete = sorted((e for e in here if e.name() in steps), key=lambda e: e.start_ns())
    spans = complete or everything
    begin = min((e.start_ns() for e in spans), default=0)
    end = max((e.end_ns() for e in spans), default=0)
    if kernels and complete:  # the last step's kernels may run longer than the host's part of it
        end = max([end, *(k.end for k in kernels if k.launched is not None and begin <= k.launched < end)])
    computing = {e.start_thread_id() for e in here if e.name().startswith((STEP, PREFIX, ENGINE))}
    return Recording(
        begin,
        end,
        [e.duration_ns() for e in complete] or [end - begin],
        [
            Mark(e.start_ns(), e.end_ns(), e.name()[len(PREFIX) :])
            for e in here
            if e.name().startswith(PREFIX)
        ],
        union((e.start_ns(), e.end_ns()) for e in here if UNDER_WAY.match(e.name())),
        union(_work([e for e in here if e.start_thread_id() in computing and not e.is_async()])),
        kernels,
        device,
        sorted((e.start_ns(), e.nbytes()) for e in everything if e.name() == MEMORY and _is_on(e, device)),
    )


def _is_on(event: Any, device: int) -> bool:
    on_host = event.device_type().name == "CPU"
    return on_host if device < 0 else not on_host and event.device_index() == device


def _work(events: list[Any]) -> Iterable[Interval]:
    """Operations that compute."""
    around = set()
    stacks: dict[int, list[int]] = {}
    events.sort(key=lambda e: (e.start_ns(), -e.end_ns()))
    for i, event in enumerate(events):
        stack = stacks.setdefault(event.start_thread_id(), [])
        while stack and events[stack[-1]].end_ns() <= event.start_ns():
            stack.pop()
        if COLLECTIVE.match(event.name()):
            around.update((i, *stack))
        stack.append(i)
    for i, event in enumerate(events):
        annotated = event.scope() in (ANNOTATION, BACKWARD_NODE) and not event.name().startswith(COMPILED)
        if i not in around and not annotated and not event.name().startswith(ENGINE):
            yield event.start_ns(), event.end_ns()


def _kernels(there: list[Any], here: list[Any]) -> tuple[list[Kernel], int]:
    """The kernels of the busiest device in order of time, and its index."""
    busy: dict[int, int] = {}
    for event in there:
        busy[event.device_index()] = busy.get(event.device_index(), 0) + event.duration_ns()
    if not busy:
        return [], -1
    device = max(busy, key=busy.__getitem__)
    launches = {e.correlation_id(): e.start_ns() for e in here if e.linked_correlation_id() == 0}
    found = []
    for event in there:
        if event.device_index() == device and event.duration_ns() > 0:
            name, launched = event.name(), launches.get(event.linked_correlation_id())
            kind = "collective" if COLLECTIVE_KERNEL.search(name) else "copy" if COPY.match(name) else "work"
            found.append(Kernel(event.start_ns(), event.end_ns(), launched, kind))
    return sorted(found, key=lambda k: k.begin), device


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
    rows.append(["a step", _ms(own.a_step(own.total)), "100 %", idle, peak])
    return "\n".join(columns([[cell for cell, there in zip(row, shown) if there] for row in rows]))


def of_ranks(ranks: Sequence[Breakdown]) -> str:
    """One line for each rank; for many ranks, only the slowest ones and the fastest."""
    rows = [["rank", "ms a step", "own work", "communication", "data wait"]]
    shown = list(ranks)
    if len(ranks) > ROWS:
        by_work = sorted(ranks, key=lambda r: -r.own)
        shown = sorted([*by_work[: ROWS - 1], by_work[-1]], key=lambda r: r.rank)
    for r in shown:
        rows.append([str(r.rank), *map(_ms, (r.a_step(r.total), r.own, r.each(COMMUNICATION), r.each(DATA)))])
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
        cure = "num_workers=2 or more reads ahead while the step computes"
        if workers:
            cure = f"more workers (num_workers={workers} now) or less work a sample would help"
        said.append(f"The loader makes the step wait {ms(own.each(DATA))}: {cure}.")
    if own.share(COMMUNICATION) >= COMMUNICATES:
        behind = own.a_step(own.hidden)
        much = own.hidden >= 0.01 * own.total
        more = f"; {ms(behind)} more of it pass behind computation" * much
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
    """A sentence that names the rank for which the others wait, if there is one."""
    if len(ranks) < 2:
        return []
    slow, fast = max(ranks, key=lambda r: r.own), min(ranks, key=lambda r: r.own)
    if slow.own - fast.own < APART * slow.a_step(slow.total):
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
