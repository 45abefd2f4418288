"""What one cycle of the profiler recorded, as far as the table needs it: plain records, read from kineto's events.

Read from the raw events and not from torch's FunctionEvents: the table needs no tree of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .intervals import Stretch, union
from .phases import PREFIX, Mark

STEP = "ProfilerStep#"
MEMORY = "[memory]"
ANNOTATION, BACKWARD_NODE = 7, 1  # torch's RecordScope.USER_SCOPE and BACKWARD_FUNCTION
# Annotations that are work: what torch.compile made, whose loops no operation of torch's records.
COMPILED = ("Torch-Compiled Region", "## Call CompiledFxGraph")
ENGINE = "autograd::engine::evaluate_function"
# Operations that launch collectives or wait for them, and what the backends call those that are under way.
COLLECTIVE = re.compile(r"^(c10d::|_c10d_functional|record_param_comms|(gloo|nccl|mpi|ucc|xccl):)")
UNDER_WAY = re.compile(r"^(gloo|mpi|ucc):")
COLLECTIVE_KERNEL = re.compile(r"nccl|rccl|oneccl|xccl", re.IGNORECASE)
COPY = re.compile(r"^mem(cpy|set)", re.IGNORECASE)


class Kernel(NamedTuple):
    """Something that ran on the device.

    Attributes:
        launched: when the host called the operation that it belongs to; None: not in the recording.
        kind: "work", "copy" or "collective".
    """

    begin: int
    end: int
    launched: int | None
    kind: str


class Allocation(NamedTuple):
    """Bytes taken (or, negative, given back) at a time."""

    at: int
    bytes: int


@dataclass
class Recording:
    """One cycle; times in ns.

    Attributes:
        begin, end: of the steps that were complete; of all there is, where none was.
        steps: how long each of them took.
        marks: of the main thread.
        flights: collectives under way, those of the host.
        working: operations that ran on the threads that compute, and hold no collective.
        kernels: of the device that had the most of them; none: the host computes.
        device: of these; -1: the host.
        allocations: on the device that computes, in order of time.
    """

    begin: int
    end: int
    steps: list[int]
    marks: list[Mark] = field(default_factory=list)
    flights: list[Stretch] = field(default_factory=list)
    working: list[Stretch] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    device: int = -1
    allocations: list[Allocation] = field(default_factory=list)


def read(events: Iterable[Any], steps: Collection[str]) -> Recording:
    """A recording from kineto's events.

    Args:
        steps: names of the steps that were complete, such as ``"ProfilerStep#2"``.
    """
    host = "CPU"
    everything = [e for e in events if e.end_ns() >= e.start_ns()]
    here = [e for e in everything if e.device_type().name == host and e.name() != MEMORY]
    taken = [e for e in everything if e.name() == MEMORY]
    annotated = {e.name() for e in here if e.scope() == ANNOTATION}  # the device's rows repeat them
    there = [
        e
        for e in everything
        if e.device_type().name != host and e.name() not in annotated and e.name() != MEMORY
    ]
    kernels, device = _kernels(there, here)
    complete = [e for e in here if e.name() in steps]
    spans = complete or everything
    begin = min((e.start_ns() for e in spans), default=0)
    end = max((e.end_ns() for e in spans), default=0)
    if kernels and complete:  # the last step's kernels may still run when the host is done with it
        end = max([end, *(k.end for k in kernels if k.launched is not None and begin <= k.launched < end)])
    main = {e.start_thread_id() for e in here if e.name().startswith((STEP, PREFIX))}
    marks = [
        Mark(e.start_ns(), e.end_ns(), e.name().removeprefix(PREFIX))
        for e in here
        if e.name().startswith(PREFIX)
    ]
    lasted = [e.duration_ns() for e in sorted(complete, key=lambda e: e.start_ns())]
    recording = Recording(begin, end, lasted or [end - begin], marks, kernels=kernels, device=device)
    recording.flights = union((e.start_ns(), e.end_ns()) for e in here if UNDER_WAY.match(e.name()))
    computing = main | {e.start_thread_id() for e in here if e.name().startswith(ENGINE)}
    recording.working = union(
        _work([e for e in here if e.start_thread_id() in computing and not e.is_async()])
    )
    recording.allocations = sorted(
        Allocation(e.start_ns(), e.nbytes())
        for e in taken
        if (
            e.device_type().name != host and e.device_index() == device
            if kernels
            else e.device_type().name == host
        )
    )
    return recording


def _work(events: list[Any]) -> Iterable[Stretch]:
    """Operations that compute: no annotation, no node of backward's (its operations count), nothing around a collective."""
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
        marked = event.scope() in (ANNOTATION, BACKWARD_NODE) and not event.name().startswith(COMPILED)
        if i not in around and not marked and not event.name().startswith(ENGINE):
            yield event.start_ns(), event.end_ns()


def _kernels(there: list[Any], here: list[Any]) -> tuple[list[Kernel], int]:
    if not there:
        return [], -1
    busy: dict[int, int] = {}
    for event in there:
        busy[event.device_index()] = busy.get(event.device_index(), 0) + event.duration_ns()
    device = max(busy, key=busy.__getitem__)
    launches = {e.correlation_id(): e.start_ns() for e in here if e.linked_correlation_id() == 0}
    found = []
    for event in there:
        if event.device_index() == device and event.duration_ns() > 0:
            name = event.name()
            kind = "collective" if COLLECTIVE_KERNEL.search(name) else "copy" if COPY.match(name) else "work"
            found.append(
                Kernel(event.start_ns(), event.end_ns(), launches.get(event.linked_correlation_id()), kind)
            )
    return sorted(found, key=lambda k: k.begin), device
