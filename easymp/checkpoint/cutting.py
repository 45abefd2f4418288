"""Rows of buffers, cut to measure without copies."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator


def cut(
    parts: Iterable[bytes | memoryview], step: int, most: int = sys.maxsize
) -> Iterator[list[memoryview]]:
    """The bytes of `parts` in groups of `step` bytes, or of `most` buffers where that comes first; the last group may be shorter."""
    group: list[memoryview] = []
    room = step
    for part in parts:
        view = memoryview(part)
        if not view.nbytes:
            continue  # which cannot be cast, if it has more than one dimension
        view = view.cast("B")
        at = 0
        while at < len(view):
            group.append(view[at : at + room])
            at += len(group[-1])
            room -= len(group[-1])
            if not room or len(group) == most:
                yield group
                group, room = [], step
    if group:
        yield group


def rest(group: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `group` after its first `count` bytes."""
    for i, view in enumerate(group):
        if count < len(view):
            return [view[count:], *group[i + 1 :]]
        count -= len(view)
    return []


def address(view: memoryview) -> int:
    """Where in memory; odd, which is never aligned, where it is read-only and ctypes does not say."""
    return 1 if view.readonly else ctypes.addressof(ctypes.c_char.from_buffer(view))
