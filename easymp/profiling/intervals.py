"""Stretches of time as sorted lists of (begin, end) that do not touch: their union, what they share, what one has and another has not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Stretch = tuple[int, int]


def union(stretches: Iterable[Stretch], gap: int = 0) -> list[Stretch]:
    """All of them, in order; those that lie at most `gap` apart become one."""
    merged: list[Stretch] = []
    for begin, end in sorted(stretches):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1] + gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def common(a: list[Stretch], b: list[Stretch]) -> list[Stretch]:
    """What lies in both."""
    return list(_common(a, b))


def _common(a: list[Stretch], b: list[Stretch]) -> Iterator[Stretch]:
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            yield begin, end
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1


def without(a: list[Stretch], b: list[Stretch]) -> list[Stretch]:
    """What lies in `a` and not in `b`."""
    left: list[Stretch] = []
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


def length(stretches: Iterable[Stretch]) -> int:
    return sum(end - begin for begin, end in stretches)
