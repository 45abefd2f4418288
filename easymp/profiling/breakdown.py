"""The time of recorded steps by phase, as a table and three sentences. Each moment belongs to one phase.

Where the host computes, it is the main thread's phase; or communication, if a collective is under way and no operation
runs, outside of the loader. Where a device computes, it is the phase in which the host launched the running kernel;
else communication, if a collective's kernel runs; else the phase of the running copy; else the host's phase, and the
device is idle. The time of collectives beside computation is hidden, and counted apart.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
KERNEL_KINDS = ("copy", "collective", "work")  # of several that run, the last in this order counts

DIFFERENCE = 0.1  # of a step, from which a slow rank is named
IDLE = "idle"
# Cause of waiting → the share of a step above which it is named, and the sentence.
CAUSES = {
    DATA: (0.1, "The loader makes the step wait {time}: {more_workers}."),
    COMMUNICATION: (
        0.15,
        """Communication, with waiting for other ranks, holds the step up for {time}; {hidden} more of it pass behind
        computation: with larger batches a rank, or accumulation, fewer steps pay for it.""",
    ),
    IDLE: (
        0.25,
        """{device} is idle for {time} of the step, the most in {idlest}: the host does not keep it busy; larger batches
        or compile=True give it more to do at a time.""",
    ),
    OPTIMIZER: (0.25, "The optimizer takes {time} at any batch size: larger batches or accumulation step less often."),
    OTHER: (0.25, "{time} of the step are the script's own work, such as logging."),
}

Interval = tuple[int, int]
Times = dict[str, int]  # ns by phase


class Kernel(NamedTuple):
    """An interval (ns) of the device."""

    begin: int
    end: int
    launched: int | None  # when the host called its operation; None: not in the recording
    kind: str  # one of KERNEL_KINDS


class Recording(NamedTuple):
    """One cycle; times in ns."""

    begin: int  # of the complete steps; of all events, if no step was complete
    end: int
    steps: list[int]  # the duration of each step
    marks: list[tuple[int, int, str]]  # intervals of the main thread and their phases
    collectives: list[Interval]  # of the host, while they are under way
    work: list[Interval]  # operations without collectives, on the threads that compute
    kernels: list[Kernel]  # of the busiest device, by time; none: the host computes
    device: int  # its index; -1: the host
    allocations: list[tuple[int, int]]  # time, and bytes (negative: freed) there


@dataclass
class Breakdown:
    """Time and memory of one rank's steps."""

    rank: int
    device: str  # that computed
    steps: list[int] = field(default_factory=list)  # duration of each in ns
    time: Times = field(default_factory=dict)  # of all steps together
    idle: Times = field(default_factory=dict)  # the device's idle part of it; empty where the host computes
    hidden: int = 0  # ns in which a collective ran beside computation
    # The most bytes, by phase, if memory was recorded: all that is allocated on a device, or what the host allocated
    # since the recording began.
    peak: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.time.values())

    def per_step(self, ns: int) -> float:
        """The average of `ns` of all steps."""
        return ns / max(1, len(self.steps))

    def phase_per_step(self, phase: str) -> float:
        """ns of a phase a step."""
        return self.per_step(self.time.get(phase, 0))

    @property
    def work_per_step(self) -> float:
        """ns a step in which this rank did not wait for a collective."""
        return self.per_step(self.total) - self.phase_per_step(COMMUNICATION)

    def add(self, recording: Recording, base: int = 0) -> None:
        """Add another cycle, which began with `base` bytes allocated, cut by its events into segments of one phase."""
        begin, end = recording.begin, recording.end
        spans = [*recording.marks, *recording.kernels, *recording.collectives, *recording.work]
        moments = [moment for span in spans for moment in span[:2]] + [moment for moment, _ in recording.allocations]
        cuts = torch.tensor([begin, end, *moments]).clamp(begin, max(begin, end)).unique()
        width = cuts.diff()

        def segments(interval: Sequence[Any]) -> slice:
            return slice(*torch.searchsorted(cuts, torch.tensor(interval[:2]).clamp(begin, end)).tolist())

        def covered(intervals: Iterable[Sequence[Any]]) -> Tensor:
            mask = torch.zeros(len(width), dtype=torch.bool)
            for interval in intervals:
                mask[segments(interval)] = True
            return mask

        host = torch.full((len(width),), PHASES.index(OTHER))
        for mark in sorted(recording.marks, key=lambda m: (m[0], -m[1])):  # the innermost of nested marks decides
            host[segments(mark)] = PHASES.index(mark[2])
        _label_losses(host)
        self.steps += recording.steps
        if recording.allocations:
            times, sizes = torch.tensor(recording.allocations).T.contiguous()
            changes = torch.zeros(len(cuts), dtype=torch.int64)
            changes.index_add_(0, torch.searchsorted(cuts, times).clamp(max=len(width)), sizes)
            levels = base + changes.cumsum(0)[:-1]
            for phase in host.unique().tolist():
                name, peak = PHASES[phase], int(levels[host == phase].max())
                self.peak[name] = max(self.peak.get(name, 0), peak)
        if recording.kernels:
            phases, busy = host.clone(), covered(recording.kernels)
            for kernel in sorted(recording.kernels, key=lambda k: KERNEL_KINDS.index(k.kind)):
                if kernel.kind == "collective":
                    phases[segments(kernel)] = PHASES.index(COMMUNICATION)
                elif kernel.launched is not None and begin <= kernel.launched < end:
                    phases[segments(kernel)] = host[int(torch.searchsorted(cuts, kernel.launched, right=True)) - 1]
                else:
                    phases[segments(kernel)] = PHASES.index(OTHER)
            _add_by_phase(self.idle, host, width * ~busy)
            collectives = covered(k for k in recording.kernels if k.kind == "collective")
            work = covered(k for k in recording.kernels if k.kind == "work")
        else:
            collectives, work = covered(recording.collectives), covered(recording.work)
            waiting = collectives & ~work & (host != PHASES.index(DATA))
            phases = host.masked_fill(waiting, PHASES.index(COMMUNICATION))
        _add_by_phase(self.time, phases, width)
        self.hidden += int(width[collectives & work].sum())


def _add_by_phase(totals: Times, phases: Tensor, width: Tensor) -> None:
    sums = torch.zeros(len(PHASES), dtype=torch.int64).index_add_(0, phases, width)
    for phase, ns in zip(PHASES, sums.tolist()):
        if ns:
            totals[phase] = totals.get(phase, 0) + ns


def _label_losses(phases: Tensor) -> None:
    """The script's own segments between a forward and the next backward are the loss, unless a batch comes between."""
    candidates: list[int] | None = None
    for i, phase in enumerate(phases.tolist()):
        if PHASES[phase] == FORWARD:
            candidates = candidates or []
        elif PHASES[phase] in (BACKWARD, DATA):
            if PHASES[phase] == BACKWARD and candidates:
                phases[candidates] = PHASES.index(LOSS)
            candidates = None
        elif PHASES[phase] == OTHER and candidates is not None:
            candidates.append(i)


# -- kineto's events ---------------------------------------------------------------------------------------------------


def read(events: Iterable[Any], steps: Collection[str]) -> Recording:
    """A recording from kineto's events; `steps` are names of the complete steps, such as ``"ProfilerStep#2"``."""
    valid = [e for e in events if e.end_ns() >= e.start_ns()]
    host = [e for e in valid if e.name() != MEMORY and e.device_type().name == "CPU"]
    annotations = {e.name() for e in host if e.scope() == ANNOTATION}  # the device's rows repeat them
    on_device = [e for e in valid if e.device_type().name != "CPU" and e.name() not in {MEMORY, *annotations}]
    kernels, device = _kernels(on_device, host)
    complete = sorted((e for e in host if e.name() in steps), key=lambda e: e.start_ns())
    spans = complete or valid
    begin = min((e.start_ns() for e in spans), default=0)
    end = max((e.end_ns() for e in spans), default=0)
    if kernels and complete:  # the last step's kernels may run longer than the host's part of it
        end = max([end, *(k.end for k in kernels if k.launched is not None and begin <= k.launched < end)])
    threads = {e.start_thread_id() for e in host if e.name().startswith((STEP, PREFIX, ENGINE))}
    return Recording(
        begin=begin,
        end=end,
        steps=[e.duration_ns() for e in complete] or [end - begin],
        marks=[(e.start_ns(), e.end_ns(), e.name()[len(PREFIX) :]) for e in host if e.name().startswith(PREFIX)],
        collectives=[(e.start_ns(), e.end_ns()) for e in host if UNDER_WAY.match(e.name())],
        work=_work([e for e in host if e.start_thread_id() in threads and not e.is_async()]),
        kernels=kernels,
        device=device,
        allocations=sorted((e.start_ns(), e.nbytes()) for e in valid if e.name() == MEMORY and _device_of(e) == device),
    )


def _work(events: list[Any]) -> list[Interval]:
    """The intervals of operations that compute (no annotations, nothing around a collective), with short pauses."""
    with_collective: set[int] = set()
    stacks: dict[int, list[int]] = {}
    events.sort(key=lambda e: (e.start_ns(), -e.end_ns()))
    for i, event in enumerate(events):
        stack = stacks.setdefault(event.start_thread_id(), [])
        while stack and events[stack[-1]].end_ns() <= event.start_ns():
            stack.pop()
        if COLLECTIVE.match(event.name()):
            with_collective.update((i, *stack))
        stack.append(i)
    merged: list[Interval] = []
    for i, event in enumerate(events):
        begin, end = event.start_ns(), event.end_ns()
        annotation = event.scope() in (ANNOTATION, BACKWARD_NODE) and not event.name().startswith(COMPILED)
        if i in with_collective or annotation or event.name().startswith(ENGINE) or begin == end:
            continue
        if merged and begin <= merged[-1][1] + PAUSE:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _device_of(event: Any) -> int:
    return -1 if event.device_type().name == "CPU" else max(0, event.device_index())


def _kernels(on_device: list[Any], host: list[Any]) -> tuple[list[Kernel], int]:
    """The kernels of the busiest device in order of time, and its index; -1 without any."""
    busy: Counter[int] = Counter()
    for event in on_device:
        busy[_device_of(event)] += event.duration_ns()
    device = max(busy, key=busy.__getitem__, default=-1)
    launches = {e.correlation_id(): e.start_ns() for e in host if e.linked_correlation_id() == 0}
    kernels = []
    for event in on_device:
        if _device_of(event) == device and event.duration_ns() > 0:
            name, launched = event.name(), launches.get(event.linked_correlation_id())
            kind = "collective" if COLLECTIVE_KERNEL.search(name) else "copy" if COPY.match(name) else "work"
            kernels.append(Kernel(event.start_ns(), event.end_ns(), launched, kind))
    return sorted(kernels, key=lambda k: k.begin), device


# -- the table and the sentences ---------------------------------------------------------------------------------------


def table(breakdown: Breakdown) -> str:
    """One rank's phases: ms a step, share, the device's idle part, and peak memory."""
    rows = [["phase", "ms a step", "share", f"{breakdown.device} idle", "peak memory"]]
    total, idle, peak = breakdown.total, breakdown.idle, breakdown.peak
    numbers = [(phase, breakdown.time.get(phase, 0), idle.get(phase, 0), peak.get(phase, 0)) for phase in PHASES]
    numbers.append(("a step", total, sum(idle.values()), max(peak.values(), default=0)))
    for name, ns, idle_ns, bytes_ in numbers:
        if ns or bytes_:
            share = f"{100 * ns / (total or 1):.0f} %"
            times = [f"{breakdown.per_step(ns) / 1e6:.2f}", share, f"{breakdown.per_step(idle_ns) / 1e6:.2f}"]
            rows.append([name, *times, size(bytes_) if bytes_ else ""])
    filled = (True, True, True, bool(idle), bool(peak))
    return "\n".join(columns([list(compress(row, filled)) for row in rows]))


def sentences(breakdown: Breakdown, ranks: Sequence[Breakdown] = (), workers: int | None = None) -> list[str]:
    """The largest phase, the largest cause of waiting with its remedy, and the slowest rank."""
    if not breakdown.total:
        return []
    largest = max(breakdown.time, key=breakdown.time.__getitem__)
    result = [f"{100 * breakdown.time[largest] / breakdown.total:.0f} % of the step is {_phase_name(largest)}."]
    times = {**breakdown.time, IDLE: sum(breakdown.idle.values())}
    causes = [cause for cause, (share, _) in CAUSES.items() if times.get(cause, 0) >= share * breakdown.total]
    if causes:
        cause = max(causes, key=times.__getitem__)
        more_workers = "num_workers=2 or more reads ahead while the step computes"
        if workers:
            more_workers = f"more workers (num_workers={workers} now) or less work a sample would help"
        sentence = CAUSES[cause][1].format(
            time=ms(breakdown.per_step(times[cause])),
            more_workers=more_workers,
            hidden=ms(breakdown.per_step(breakdown.hidden)),
            device=breakdown.device,
            idlest=_phase_name(max(breakdown.idle, key=breakdown.idle.__getitem__, default=OTHER)),
        )
        result.append(" ".join(sentence.split()))
    by_work = sorted(ranks, key=lambda r: r.work_per_step) or [breakdown]
    fast, slow = by_work[0], by_work[-1]
    difference = slow.work_per_step - fast.work_per_step
    if difference >= max(1, DIFFERENCE * slow.per_step(slow.total)):
        by_loader = slow.phase_per_step(DATA) - fast.phase_per_step(DATA) > difference / 2
        work = f"{ms(slow.work_per_step)} of its own work a step, rank {fast.rank} only {ms(fast.work_per_step)}"
        loader = " (its loader)" if by_loader else ""
        result.append(f"Rank {slow.rank} is the slowest{loader}: {work}: the others wait for it.")
    return result


def ms(ns: float) -> str:
    return f"{ns / 1e6:.1f} ms" if ns >= 1e5 else f"{ns / 1e3:.0f} µs"


def _phase_name(phase: str) -> str:
    return "the script's own" if phase == OTHER else phase
