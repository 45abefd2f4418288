"""Where the elements that this rank holds of a tensor belong in the whole: the link between live tensors and boxes.

A DTensor cuts a dimension as torch.chunk does: pieces of ceil(length / ranks), the last ones shorter or empty. fsdp over tensor
parallelism cuts a dimension twice, first over the ranks of tensor parallelism. torch writes that as ``_StridedShard(dim, split_factor)`` on
fsdp's mesh dimension, the first one; what it computes from that order of the mesh is wrong where lengths do not divide evenly (9 rows on
4 × 2 ranks), so places are computed here, in the order in which the cuts were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .boxes import Box, Shape, whole

Run = tuple[int, int]
"""First element and count along one dimension."""


@dataclass(frozen=True, eq=False)
class Place:
    """What one rank holds of a tensor.

    Attributes:
        shape: of the whole tensor.
        parts: boxes of it, each with the elements that lie there, as a view that shares the live tensor's memory and has the box's
            shape; any strides. None where this rank's shard is empty; several where elements that are neighbours here are not in the
            whole.
    """

    shape: Shape
    parts: tuple[tuple[Box, Tensor], ...]


def place_of(tensor: Tensor) -> Place | None:
    """Where `tensor`, plain or a DTensor, lies on this rank; None for a meta tensor, of which nothing is here. No collective.

    Raises:
        CheckpointError: a DTensor whose elements are sums that are still to be made, or of a layout that is not known here; or a
            sparse tensor.
    """
    with torch.no_grad():
        spread: Any = (
            tensor if hasattr(tensor, "to_local") else None
        )  # DTensor, whose class takes long to import
        local = (tensor if spread is None else spread.to_local()).detach()
        if local.is_meta:
            return None
        if local.layout != torch.strided:
            raise CheckpointError(
                f"a tensor of layout {local.layout} cannot be stored or loaded: convert it with to_dense()"
            )
        shape = tuple(tensor.shape)
        if spread is None:
            return Place(shape, ((whole(shape), local),))
        mesh = spread.device_mesh
        at = mesh.get_coordinate()
        if at is None:  # a mesh of other ranks
            return Place(shape, ())
        held = runs_held(shape, tuple(mesh.shape), at, spread.placements)
        if tuple(sum(count for _, count in runs) for runs in held) != tuple(local.shape):
            raise CheckpointError(
                f"a DTensor of {list(shape)} on a mesh of {list(mesh.shape)} as {list(spread.placements)} holds {list(local.shape)} "
                f"here, which is not what that layout says: redistribute it to Shard or Replicate"
            )
        return Place(shape, tuple(_parts(held, local)))


def runs_held(
    shape: Sequence[int], mesh: Sequence[int], at: Sequence[int], placements: Sequence[Any]
) -> list[list[Run]]:
    """What the rank with coordinates `at` holds of each dimension, in the order in which it lies there.

    Raises:
        CheckpointError: a placement that is neither a shard nor whole.
    """
    held: list[list[Run]] = [[(0, length)] for length in shape]
    late = []
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        dim = None if placement.is_partial() else getattr(placement, "dim", None)
        if dim is None:
            raise CheckpointError(
                f"a DTensor with the placement {placement!r} has no values yet that could be stored or loaded: redistribute it to Shard "
                "or Replicate"
            )
        factor = getattr(placement, "split_factor", 1)
        after = prod(
            mesh[i] for i in range(axis + 1, len(mesh)) if getattr(placements[i], "dim", None) == dim
        )
        if factor == after > 1:
            late.append((dim, axis))  # cut when those to the right had been
        elif factor > 1:
            held[dim] = [
                r for i in range(factor) for r in _chunk(_chunk(held[dim], factor, i), mesh[axis], at[axis])
            ]
        else:
            held[dim] = _chunk(held[dim], mesh[axis], at[axis])
    for dim, axis in reversed(late):
        held[dim] = _chunk(held[dim], mesh[axis], at[axis])
    return held


def _chunk(runs: Sequence[Run], count: int, index: int) -> list[Run]:
    """Piece `index` of `count`, as torch.chunk makes them of the elements of `runs`, one run after the other."""
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


def _parts(held: Sequence[Sequence[Run]], local: Tensor) -> list[tuple[Box, Tensor]]:
    parts = []
    for choice in product(*map(range, map(len, held))):
        box = Box(
            tuple(held[d][i][0] for d, i in enumerate(choice)),
            tuple(held[d][i][1] for d, i in enumerate(choice)),
        )
        view = local
        for d, i in enumerate(choice):
            view = view.narrow(d, sum(n for _, n in held[d][:i]), box.shape[d])
        parts.append((box, view))
    return parts
