"""Adasum: a sum of gradients that does not count twice what they have in common.

Adasum(a, b) = (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b, over the ranks in a tree of neighbours: orthogonal gradients are added, equal ones
averaged. Source: arXiv:2006.02924.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def adasum(tensors: Sequence[Tensor]) -> Tensor:
    """Of the ranks' tensors of one shape, in rank order; with an odd number the last one goes up the tree as it is."""
    level = list(tensors)
    while len(level) > 1:
        pairs = [pair(a, b) for a, b in zip(level[::2], level[1::2])]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


def pair(a: Tensor, b: Tensor) -> Tensor:
    """Of two; dot products in double precision, and a tensor of zeros takes no part."""
    x, y = a.double(), b.double()
    dot, xx, yy = (x * y).sum(), (x * x).sum(), (y * y).sum()
    left = 1 - dot / (2 * xx) if xx > 0 else 1.0
    right = 1 - dot / (2 * yy) if yy > 0 else 1.0
    return (left * x + right * y).to(a.dtype)
