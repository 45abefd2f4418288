"""The phases of a step, and when the host was in which.

Marks (``easymp: backward``) lie in the trace beside everything else. They may be nested, as when an optimizer calls a closure: the inner
one counts. What no mark covers is the script's own; between a model's call and the backward that follows it, it is the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

PREFIX = "easymp: "  # of marks in a trace

DATA, FORWARD, LOSS, BACKWARD, OPTIMIZER = "data wait", "forward", "loss", "backward", "optimizer"
COMMUNICATION, NO_GRAD, OTHER = "communication", "forward, no grad", "other"
PHASES = (DATA, FORWARD, LOSS, BACKWARD, COMMUNICATION, OPTIMIZER, NO_GRAD, OTHER)  # in the order of a table


class Mark(NamedTuple):
    """A stretch of the main thread (ns) in which it was in `phase`."""

    begin: int
    end: int
    phase: str


def timeline(marks: Iterable[Mark], begin: int, end: int) -> list[Mark]:
    """`begin` to `end` without a gap, each part in one phase."""
    parts = [
        Mark(max(m.begin, begin), min(m.end, end), m.phase) for m in _filled(_innermost(marks), begin, end)
    ]
    return list(_losses([m for m in parts if m.begin < m.end]))


def _innermost(marks: Iterable[Mark]) -> Iterator[Mark]:
    """Marks of one thread, which begin and end like brackets, as parts that do not overlap."""
    stack: list[Mark] = []
    at = 0
    for mark in sorted(marks, key=lambda m: (m.begin, -m.end)):
        while stack and stack[-1].end <= mark.begin:
            done = stack.pop()
            yield Mark(at, done.end, done.phase)
            at = done.end
        if stack:
            yield Mark(at, mark.begin, stack[-1].phase)
        stack.append(mark)
        at = mark.begin
    while stack:
        done = stack.pop()
        yield Mark(at, done.end, done.phase)
        at = done.end


def _filled(parts: Iterable[Mark], begin: int, end: int) -> Iterator[Mark]:
    at = begin
    for part in parts:
        if part.end <= part.begin:
            continue
        if part.begin > at:
            yield Mark(at, part.begin, OTHER)
        yield part
        at = max(at, part.end)
    if at < end:
        yield Mark(at, end, OTHER)


def _losses(parts: list[Mark]) -> Iterator[Mark]:
    """What is the script's own between a forward and the backward after it becomes the loss."""
    next_is_backward = [False] * len(parts)
    following = False
    for i in range(len(parts) - 1, -1, -1):
        next_is_backward[i] = following
        if parts[i].phase in (BACKWARD, DATA):
            following = parts[i].phase == BACKWARD
    forward = False
    for part, before_backward in zip(parts, next_is_backward):
        if part.phase in (FORWARD, BACKWARD, DATA):
            forward = part.phase == FORWARD
        yield part._replace(phase=LOSS) if part.phase == OTHER and forward and before_backward else part
