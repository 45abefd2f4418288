"""The true global norm of gradients that lie on the ranks in any layout: each element counts once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..base.dtensor import local
from ..distributed import World
from ..optim.norms import multiply, values
from ..protocols import Counting


def clip_whole(parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """torch.nn.utils.clip_grad_norm_, of sparse gradients too, whose rows count once."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not any(grad.is_sparse for grad in grads):
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    total = nn.utils.get_total_norm([values(grad) for grad in grads], norm_type)
    multiply(grads, (max_norm / (total + 1e-6)).clamp(max=1.0))
    return total


def clip_to_norm(parameters: Sequence[Tensor], max_norm: float, norm_type: float, world: World) -> Tensor:
    """Scale gradients so that their total norm is at most `max_norm`; returns the norm before (0-dim, alike on all ranks).

    Gradients are plain tensors, alike on all ranks, and DTensors of any meshes and placements, mixed. A collective: every rank passes
    the same parameters, whose gradients may have no element on some of the ranks.
    """
    with torch.no_grad():
        for parameter in parameters:
            settle(parameter)
        grads = [p.grad for p in parameters if p.grad is not None]
        total = total_norm(grads, norm_type, world)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        multiply(grads, factor)
    return total


def counting(world: World) -> Counting:
    """For gradients in any layouts over the ranks of `world`."""

    def add(totals: Tensor) -> None:
        totals.copy_(
            world.reduce(totals.to(world.device))
        )  # a rank that holds none of the gradients has them anywhere

    return Counting(lambda parameter: copies(parameter, world.size), add, settle)


def total_norm(tensors: Sequence[Tensor], norm_type: float, world: World) -> Tensor:
    """The norm of all elements of all `tensors`, none of them Partial; 0-dim, alike on all ranks.

    An element that lies on c ranks is weighted by 1/c: (Σ_ranks Σ_local |x|^p / c)^(1/p). Computed on what lies here, for plain
    tensors and DTensors do not mix in one list, nor do DTensors of two meshes.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        part = values(local(tensor))
        if part.numel():
            by_copies.setdefault(copies(tensor, world.size), []).append(part)
    here = [
        nn.utils.get_total_norm(parts, norm_type).to(world.device) * count ** (-1.0 / norm_type)
        for count, parts in by_copies.items()
    ]
    mine = (
        torch.linalg.vector_norm(torch.stack(here), norm_type)
        if here
        else torch.zeros((), device=world.device)
    )
    return torch.linalg.vector_norm(world.gather(mine), norm_type)


def copies(tensor: Any, ranks: int) -> int:
    """On how many of `ranks` ranks an element of `tensor` lies: a plain tensor on all, a sharded one on fewer."""
    if not hasattr(tensor, "to_local"):
        return ranks
    shards = 1
    for dim, placement in enumerate(tensor.placements):
        # _StridedShard, under fsdp and tensor parallelism, has been a Shard, and has stopped to be one; what is neither a copy nor a
        # summand is a shard in every version of torch.
        if not placement.is_replicate():
            shards *= tensor.device_mesh.size(dim)
    return ranks // shards


def settle(parameter: Any) -> None:
    """Give `parameter`'s gradient the layout of `parameter`, where torch's backward left it in another.

    Summands on the ranks are added up then (a collective), and what is whole although the parameter is split is cut.
    """
    grad = parameter.grad
    if hasattr(grad, "to_local") and grad.placements != parameter.placements:
        parameter.grad = grad.redistribute(placements=parameter.placements)
