"""Collectives over nested batches: functions of a tree, on the open run's world or a given one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .errors import SettingError
from .state import current_world
from .tree import recursively_apply
from .world import World


def gather(tensor: Any, *, world: World | None = None) -> Any:
    """Every tensor of the tree joined over the ranks along dimension 0 (scalars become one element a rank)."""
    return recursively_apply((world or current_world()).gather, tensor, error_on_other_type=True)


def gather_object(object: list[Any], *, world: World | None = None) -> list[Any]:
    """The ranks' lists of Python objects, one after the other."""
    parts = (world or current_world()).gather_objects(object)
    return [item for part in parts for item in part]


def broadcast(tensor: Any, from_process: int = 0, *, world: World | None = None) -> Any:
    """Rank `from_process`'s values in every tensor of the tree; structure and shapes must agree over the ranks."""
    return recursively_apply((world or current_world()).broadcast, tensor, from_process, error_on_other_type=True)


def broadcast_object_list(object_list: list[Any], from_process: int = 0, *, world: World | None = None) -> list[Any]:
    """Rank `from_process`'s list, filled into the given one of the same length, which is returned."""
    return (world or current_world()).broadcast_objects(object_list, from_process)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0, *, world: World | None = None) -> Any:
    """Every tensor of the tree summed or averaged over the ranks, then multiplied by `scale`; ``"none"`` only scales.

    Raises:
        SettingError: a `reduction` other than sum, mean, none.
    """
    if reduction not in ("sum", "mean", "none"):
        raise SettingError(f"reduction={reduction!r} is not one of sum, mean, none")
    there = world or current_world()

    def one(leaf: Tensor) -> Tensor:
        out = leaf.clone() if reduction == "none" else there.reduce(leaf, reduction)
        return out if scale == 1.0 else out * scale

    return recursively_apply(one, tensor, error_on_other_type=True)


def pad_across_processes(
    tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False, *, world: World | None = None
) -> Any:
    """Every tensor of the tree as long along `dim` as the longest rank's, filled with `pad_index` (in front: `pad_first`)."""
    there = world or current_world()

    def one(leaf: Tensor) -> Tensor:
        if not -leaf.ndim <= dim < leaf.ndim:
            return leaf
        longest = int(there.reduce(torch.tensor(leaf.shape[dim], device=there.device), "max").item())
        missing = longest - leaf.shape[dim]
        if not missing:
            return leaf
        shape = list(leaf.shape)
        shape[dim] = missing
        filler = leaf.new_full(shape, pad_index)
        return torch.cat([filler, leaf] if pad_first else [leaf, filler], dim=dim)

    return recursively_apply(one, tensor, error_on_other_type=True)
