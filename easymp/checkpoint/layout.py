"""Chunks of tensors, as arithmetic: the overlap of two layouts, where it lies in memory, and the chunks of a live tensor on this rank.

A `Box` is a chunk that one rank holds, or one file stores: an offset and a shape, in elements, row-major.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError

Shape = tuple[int, ...]
SPLIT = 5  # dimensions of a tensor along which it may be cut: a box has two to that power of corners
CORNERS = 2**23  # of all boxes of a tensor; they are held in memory


class Box(NamedTuple):
    """A chunk of a tensor: the place of its first element, and its shape."""

    offset: Shape
    shape: Shape

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def __str__(self) -> str:
        """As in a slice: ``[0:128,0:64]``."""
        return "[" + ",".join(f"{o}:{o + n}" for o, n in zip(self.offset, self.shape)) + "]"


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def overlap(a: Box, b: Box) -> Box | None:
    """The common elements of two boxes; None if there are none."""
    offset = tuple(map(max, a.offset, b.offset))
    end = tuple(min(o + n, p + m) for o, n, p, m in zip(a.offset, a.shape, b.offset, b.shape))
    if any(e <= o for o, e in zip(offset, end)):
        return None
    return Box(offset, tuple(e - o for o, e in zip(offset, end)))


def strides(shape: Shape) -> Shape:
    """Elements from one index of each dimension to the next, in row-major memory."""
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


def span(part: Box, within: Box) -> int:
    """Number of elements from the first to the last one of `part` in the row-major memory of `within`, which contains it."""
    steps = zip(part.shape, strides(within.shape))
    return sum((n - 1) * stride for n, stride in steps) + 1 if part.count else 0


def runs(part: Box, within: Box) -> Iterator[tuple[int, int]]:
    """(first, count) of each contiguous run of `part` in the row-major memory of `within`, which contains it, in order."""
    if not part.count:
        return
    if part == within:  # most are, and arithmetic for thousands of them takes its time
        yield 0, part.count
        return
    steps = strides(within.shape)
    # Trailing dimensions that `part` takes whole are contiguous.
    inner = len(within.shape)
    while inner and part.shape[inner - 1] == within.shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)
    length = prod(part.shape[inner:])
    outer = part.shape[:inner]
    start = sum((o - w) * s for o, w, s in zip(part.offset, within.offset, steps))
    for at in product(*(range(0, n * s, s) for n, s in zip(outer, steps))):
        yield start + sum(at), length


def fault(shape: Shape, boxes: Sequence[Box]) -> str | None:
    """Why `boxes` do not cover a tensor of `shape` exactly once; None where they do.

    The time is linear in the number of boxes. A function of the elements ("how many boxes hold this one") is known by its steps: a
    box adds 1 at its first corner and 1 or -1 at the others, those just behind its ends. So the boxes cover what one box of `shape`
    covers if and only if their steps add up to that one's; and the first place, by row, where they do not is where the count is wrong.
    """
    for box in boxes:
        if len(box.shape) != len(shape) or len(box.offset) != len(shape):
            return f"{box} has {len(box.shape)} dimensions, and the tensor {len(shape)}"
        if any(o < 0 or n < 0 or o + n > s for o, n, s in zip(box.offset, box.shape, shape)):
            return f"{box} lies outside of {list(shape)}"
    solid = [box for box in boxes if box.count]
    # A dimension that every box covers whole adds no information.
    cut = [d for d, length in enumerate(shape) if any(box.shape[d] != length for box in solid)]
    if len(cut) > SPLIT:
        return f"the tensor is cut along {len(cut)} dimensions, and at most {SPLIT} are understood"
    if len(solid) << len(cut) > CORNERS:
        most = CORNERS >> len(cut)
        return f"the tensor is cut into {len(solid)} boxes along {len(cut)} dimensions, and at most {most} are understood"
    steps: Counter[Shape] = Counter()
    for box in solid:
        _add_corners(steps, [(box.offset[d], box.offset[d] + box.shape[d]) for d in cut], 1)
    if prod(shape):
        _add_corners(steps, [(0, shape[d]) for d in cut], -1)
    wrong = min((corner for corner, step in steps.items() if step), default=None)
    if wrong is None:
        return None
    place = [0] * len(shape)
    for d, at in zip(cut, wrong):
        place[d] = at
    here = [str(b) for b in solid if all(o <= at < o + n for at, o, n in zip(place, b.offset, b.shape))]
    if here:
        return f"{here[0]} and {here[1]} overlap"
    return f"{len(solid)} boxes leave holes in {list(shape)}: the element {place} is in none"


def _add_corners(steps: Counter[Shape], ends: Sequence[tuple[int, int]], sign: int) -> None:
    corners: list[tuple[Shape, int]] = [((), sign)]
    for low, high in ends:
        corners = [corner for at, by in corners for corner in (((*at, low), by), ((*at, high), -by))]
    for at, by in corners:
        steps[at] += by


def slices(box: Box, most: int) -> Iterator[Box]:
    """`box` in parts of at most `most` elements, in the order of its memory."""
    dim = next((d for d, n in enumerate(box.shape) if n > 1), None)
    if box.count <= most or dim is None:
        yield box
        return
    each = max(most // (box.count // box.shape[dim]), 1)
    for first in range(0, box.shape[dim], each):
        offset = (*box.offset[:dim], box.offset[dim] + first, *box.offset[dim + 1 :])
        shape = (*box.shape[:dim], min(each, box.shape[dim] - first), *box.shape[dim + 1 :])
        yield from slices(Box(offset, shape), most)


# -- the chunks of a live tensor --------------------------------------------------------------------------------------


Run = tuple[int, int]
"""First element and count along one dimension."""


class Place(NamedTuple):
    """The chunks of a tensor on one rank.

    Attributes:
        shape: of the whole tensor.
        parts: boxes of it, each with its elements as a view of the live tensor's memory, of the box's shape and any strides. None
            where this rank's shard is empty; several where neighbours here are apart in the whole.
    """

    shape: Shape
    parts: tuple[tuple[Box, Tensor], ...]


def places_of(tensors: Iterable[Tensor]) -> list[Place | None]:
    """The chunks of each tensor, plain or a DTensor, on this rank; None for a meta tensor. No collective."""
    with torch.no_grad():
        return [_place(tensor) for tensor in tensors]


def _place(tensor: Tensor) -> Place | None:
    spread: Any = tensor if hasattr(tensor, "to_local") else None  # DTensor, which takes long to import
    local = (tensor if spread is None else spread.to_local()).detach()
    if local.is_meta:
        return None
    if local.layout != torch.strided:
        raise CheckpointError(
            f"a tensor of layout {local.layout} cannot be stored or loaded: convert it with to_dense()"
        )
    shape = tuple(tensor.shape)
    if spread is None:
        return Place(shape, ((Box((0,) * len(shape), shape), local),))
    mesh = spread.device_mesh
    at = mesh.get_coordinate()
    if at is None:  # a mesh of other ranks
        return Place(shape, ())
    held = runs_held(shape, tuple(mesh.shape), at, spread.placements)
    if tuple(sum(count for _, count in runs) for runs in held) != tuple(local.shape):
        raise CheckpointError(
            f"a DTensor of {list(shape)} on a mesh of {list(mesh.shape)} as {list(spread.placements)} holds {list(local.shape)} "
            f"here, which that layout does not say: redistribute it to Shard or Replicate"
        )
    parts = []
    for choice in product(*held):
        view = local
        for d, run in enumerate(choice):
            view = view.narrow(d, sum(n for _, n in held[d][: held[d].index(run)]), run[1])
        parts.append((Box(tuple(first for first, _ in choice), tuple(n for _, n in choice)), view))
    return Place(shape, tuple(parts))


def runs_held(
    shape: Sequence[int], mesh: Sequence[int], at: Sequence[int], placements: Sequence[Any]
) -> list[list[Run]]:
    """The runs of each dimension on the rank with coordinates `at`, in the order of its memory."""
    held: list[list[Run]] = [[(0, length)] for length in shape]
    late = []
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        dim = None if placement.is_partial() else getattr(placement, "dim", None)
        if dim is None:
            raise CheckpointError(
                f"a DTensor cannot be stored or loaded as {placement!r}: redistribute it to Shard or Replicate"
            )
        factor = getattr(placement, "split_factor", 1)
        after = prod(
            mesh[i] for i in range(axis + 1, len(mesh)) if getattr(placements[i], "dim", None) == dim
        )
        if factor == after > 1:
            late.append((dim, axis))  # cut when those to the right had been
        elif factor > 1:
            chunks = [_chunk(held[dim], factor, i) for i in range(factor)]
            held[dim] = [run for chunk in chunks for run in _chunk(chunk, mesh[axis], at[axis])]
        else:
            held[dim] = _chunk(held[dim], mesh[axis], at[axis])
    for dim, axis in reversed(late):
        held[dim] = _chunk(held[dim], mesh[axis], at[axis])
    return held


def _chunk(runs: Sequence[Run], count: int, index: int) -> list[Run]:
    """Piece `index` of the `count` into which torch.chunk cuts the elements of `runs`."""
    size = -(-sum(n for _, n in runs) // count)
    skip, left = index * size, size
    piece = []
    for first, n in runs:
        passed = min(skip, n)
        skip -= passed
        taken = min(left, n - passed)
        left -= taken
        if taken:
            piece.append((first + passed, taken))
    return piece


def on_host(tensor: Tensor, name: str) -> Tensor:
    """A whole tensor on the CPU, contiguous; the tensor itself if it is that already."""
    if tensor.is_meta:
        raise CheckpointError(f"{name} is on the meta device: prepare the model, or load_weights into it")
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
