"""Boxes of tensors, as pure arithmetic: what two layouts have in common, and where that lies in memory.

A box is what one rank holds, or one file stores, of a tensor: an offset and a shape, in elements, row-major.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

Shape = tuple[int, ...]


class Box(NamedTuple):
    """A part of a tensor: its first element's place, and its shape."""

    offset: Shape
    shape: Shape

    @property
    def count(self) -> int:
        """Elements in it."""
        return prod(self.shape)

    def __str__(self) -> str:
        """As in a slice: ``[0:128,0:64]``."""
        return "[" + ",".join(f"{o}:{o + n}" for o, n in zip(self.offset, self.shape)) + "]"


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def overlap(a: Box, b: Box) -> Box | None:
    """What lies in both; None where nothing does."""
    offset = tuple(map(max, a.offset, b.offset))
    end = tuple(min(o + n, p + m) for o, n, p, m in zip(a.offset, a.shape, b.offset, b.shape))
    if any(e <= o for o, e in zip(offset, end)):
        return None
    return Box(offset, tuple(e - o for o, e in zip(offset, end)))


def runs(part: Box, within: Box) -> Iterator[tuple[int, int]]:
    """The elements of `part` in the row-major memory of `within`, which holds it: (first, count) of each contiguous run, in order."""
    if not part.count:
        return
    strides = [prod(within.shape[d + 1 :]) for d in range(len(within.shape))]
    # From the last dimension on, as long as `part` takes rows as they are, they follow one another.
    inner = len(within.shape)
    while inner and part.shape[inner - 1] == within.shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)
    length = prod(part.shape[inner:])
    outer = part.shape[:inner]
    start = sum((o - w) * s for o, w, s in zip(part.offset, within.offset, strides))
    at = [0] * len(outer)
    for _ in range(prod(outer)):
        yield start + sum(a * s for a, s in zip(at, strides)), length
        for d in range(len(outer) - 1, -1, -1):
            at[d] += 1
            if at[d] < outer[d]:
                break
            at[d] = 0


def fault(shape: Shape, boxes: Sequence[Box]) -> str | None:
    """Why `boxes` do not cover a tensor of `shape` exactly once, in words; None where they do."""
    for box in boxes:
        if len(box.shape) != len(shape) or len(box.offset) != len(shape):
            return f"{box} has {len(box.shape)} dimensions, and the tensor {len(shape)}"
        if any(o < 0 or n < 0 or o + n > s for o, n, s in zip(box.offset, box.shape, shape)):
            return f"{box} lies outside of {list(shape)}"
    solid = sorted(box for box in boxes if box.count)
    for i, box in enumerate(solid):
        for other in solid[i + 1 :]:
            if box.offset and other.offset[0] >= box.offset[0] + box.shape[0]:
                break  # they are sorted by their first row
            if overlap(box, other):
                return f"{box} and {other} overlap"
    if sum(box.count for box in solid) != prod(shape):
        return f"{', '.join(map(str, solid)) or 'nothing'} leaves holes in {list(shape)}"
    return None
