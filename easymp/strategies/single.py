"""single: one process, one device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..base.dtensor import local
from ..distributed import World
from ..optim.torch_step import multiply, values
from ..options import DistributedDataParallelKwargs
from ..protocols import Counting, Facts, Layout, Manner, Refusal


class Single:
    """The model, under autocast. Takes ddp's options, for scripts that run on one process and on several; they mean nothing here."""

    name: ClassVar[str] = "single"
    Options: ClassVar[type] = DistributedDataParallelKwargs
    sharded: ClassVar[bool] = False
    once = ""
    only_forward = ""
    data_rank = 0
    data_size = 1
    data_group = None
    whole: ClassVar[bool] = True
    apart: ClassVar[bool] = False
    masters: ClassVar[bool] = True
    sums = True
    alike: ClassVar[bool] = True
    early: ClassVar[bool] = False

    def __init__(self, world: World, options: DistributedDataParallelKwargs) -> None:
        self._device = world.device

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        if facts.world_size > 1:
            return Refusal(
                f"strategy 'single' is for one process, and {facts.world_size} were started: each would train alone",
                "use strategy='ddp' or 'auto', or start one process",
            )
        return None

    @staticmethod
    def layout(model: nn.Module, options: Any, size: int, local_size: int) -> Layout:
        return Layout()

    def wrap(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], manner: Manner
    ) -> nn.Module:
        if manner.place:
            model.to(self._device)
        module = manner.policy.forward(manner.policy.convert(model), self._device)
        manner.compile(module)
        return module

    def spread(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return nullcontext()

    def force_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return nullcontext()

    def average(self, models: Sequence[nn.Module], gradients: Sequence[Tensor]) -> None:
        pass

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        return nullcontext()

    @property
    def counting(self) -> Counting:
        return Counting()

    def clip(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        return clip_whole(parameters, max_norm, norm_type)

    def release(self, model: nn.Module, alone: nn.Module) -> nn.Module:
        return alone


# -- The true global norm of gradients that lie on the ranks in any layout: each element counts once.


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


# -- Frames around a model: modules that call it, and do nothing else.


class Framed(nn.Module):
    """Calls a module of torch's own (a bare nn.Sequential), whose code torch.compile passes over when DDP calls it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)
