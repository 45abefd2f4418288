"""Events of a profile: marks of the phases of a step, and kineto's raw events read into plain records.

While a profile is open, instances of easymp's objects have functions in place of the methods that a step calls; they mark the phase
(``easymp: backward``) and call the method. A run without a profile has none of them. A model is marked around all hooks, where
torch.compile puts its compiled call. Closing the profile removes the functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.profiler import record_function

PREFIX = "easymp: "  # of marks in a trace
DATA, FORWARD, LOSS, BACKWARD, OPTIMIZER = "data wait", "forward", "loss", "backward", "optimizer"
COMMUNICATION, NO_GRAD, OTHER = "communication", "forward, no grad", "other"
PHASES = (DATA, FORWARD, LOSS, BACKWARD, COMMUNICATION, OPTIMIZER, NO_GRAD, OTHER)  # in the order of a table

Target = tuple[Any, str, str]  # an object, its method, and the phase of that method
CALL = "_compiled_call_impl"  # the attribute of a module that its call runs, where it is set

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


# -- marks -------------------------------------------------------------------------------------------------------------


def marked(accelerator: Any, prepared: Any, world: Any) -> Iterator[Target]:
    """The methods that a step of `accelerator` calls, on the objects `prepared` so far."""
    for model in prepared.models:
        yield model.module, CALL, FORWARD
        if prepared.strategy.late_loss:  # stages run their forwards inside backward
            yield model.module.module, CALL, FORWARD
    yield accelerator, "backward", BACKWARD
    for name in ("clip_grad_norm_", "clip_grad_value_", "unscale_gradients"):
        yield accelerator, name, OPTIMIZER
    for optimizer in prepared.optimizers:
        yield optimizer, "step", OPTIMIZER
        yield optimizer, "zero_grad", OPTIMIZER
    for scheduler in prepared.schedulers:
        yield scheduler, "step", OPTIMIZER
    yield world, "barrier", COMMUNICATION


class Marks:
    """Shadows `targets` between `open` and `close`. A further `open` shadows those that were added since."""

    def __init__(self, targets: Callable[[], Iterator[Target]]) -> None:
        self._targets = targets
        self._shadows: dict[tuple[int, str], Shadow] = {}

    def open(self) -> None:
        for thing, name, phase in self._targets():
            if (id(thing), name) not in self._shadows:
                self._shadows[id(thing), name] = Shadow(thing, name, phase)

    def close(self) -> None:
        while self._shadows:
            self._shadows.popitem()[1].lift()


class Shadow:
    """One method of one instance, marked until `lift`."""

    def __init__(self, thing: Any, name: str, phase: str) -> None:
        self._attributes, self._name = thing.__dict__, name
        self._before = self._attributes.get(name)
        method = (self._before or thing._call_impl) if isinstance(thing, nn.Module) else getattr(thing, name)
        self._lifted = False

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._lifted:  # the script has wrapped this function in the meantime and keeps it
                return method(*args, **kwargs)
            there = NO_GRAD if phase == FORWARD and not torch.is_grad_enabled() else phase
            with record_function(PREFIX + there):
                return method(*args, **kwargs)

        self._call = self._attributes[name] = call

    def lift(self) -> None:
        self._lifted = True
        if self._attributes.get(self._name) is not self._call:
            return
        if self._before is None:
            del self._attributes[self._name]
        else:
            self._attributes[self._name] = self._before


class Waits:
    """Marks the time inside a loader's ``next``, as the window reports it, and calls `begin_step` at the beginning of a step.

    A step begins when the outermost loader is asked for the batch after one that it gave, unless that batch's accumulation window is
    still open.
    """

    def __init__(self, window: Any, begin_step: Callable[[], None]) -> None:
        self._window, self._begin_step = window, begin_step
        self._open: list[tuple[Any, record_function]] = []
        self._given = False

    def asks(self, loader: Any) -> None:
        if self._given and self._window.outermost is loader and self._window.sync:
            self._given = False
            self._begin_step()
            if self._window.timing is not self:
                return  # that was the last step to be recorded
        mark = record_function(PREFIX + DATA)
        mark.__enter__()
        self._open.append((loader, mark))

    def has(self, loader: Any) -> None:
        self._given |= self._window.outermost is loader
        self.over(loader)

    def over(self, loader: Any) -> None:
        while any(asking is loader for asking, _ in self._open):
            self._open.pop()[1].__exit__(None, None, None)


# -- intervals: sorted lists of (begin, end) that do not touch ---------------------------------------------------------

Interval = tuple[int, int]


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


@dataclass
class Recording:
    """One cycle; times in ns."""

    begin: int  # of the complete steps; of all events, if no step was complete
    end: int
    steps: list[int]  # the duration of each step
    marks: list[Mark] = field(default_factory=list)  # of the main thread
    flights: list[Interval] = field(default_factory=list)  # collectives of the host that are under way
    working: list[Interval] = field(
        default_factory=list
    )  # operations without collectives, on the threads that compute
    kernels: list[Kernel] = field(
        default_factory=list
    )  # of the busiest device, by time; none: the host computes
    device: int = -1  # its index; -1: the host
    allocations: list[tuple[int, int]] = field(
        default_factory=list
    )  # time, and bytes (negative: freed) there


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
        [_mark(e) for e in here if e.name().startswith(PREFIX)],
        union((e.start_ns(), e.end_ns()) for e in here if UNDER_WAY.match(e.name())),
        union(_work([e for e in here if e.start_thread_id() in computing and not e.is_async()])),
        kernels,
        device,
        sorted((e.start_ns(), e.nbytes()) for e in everything if e.name() == MEMORY and _is_on(e, device)),
    )


def _mark(event: Any) -> Mark:
    return Mark(event.start_ns(), event.end_ns(), event.name().removeprefix(PREFIX))


def _is_on(event: Any, device: int) -> bool:
    on_host = event.device_type().name == "CPU"
    return on_host if device < 0 else not on_host and event.device_index() == device


def _work(events: list[Any]) -> Iterable[Interval]:
    """Operations that compute.

    Annotations, nodes of backward and operations around a collective do not count; the operations inside them do.
    """
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
