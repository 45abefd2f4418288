"""zero1: as ddp, with optimizer states sharded (ZeRO-1).

Parameters and gradients are whole on every rank, and DistributedDataParallel averages the gradients. Each rank keeps optimizer states
for its rows of each parameter only, updates these rows, and gathers the others. Compared with ddp, a step sends the parameters once
more, and Adam's state takes 8 / ranks bytes a parameter instead of 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from ..distributed import World
from ..optim.partition import packed_at_once
from ..optim.sharded import ShardedOptimizer
from ..options import DistributedDataParallelKwargs
from ..protocols import Layout, WrapContext, chunk_elements
from .blocks import refuse_sparse
from .ddp import DDP
from .single import Single


class ZeRO1(DDP):
    """DistributedDataParallel, and optimizers that keep a part of their state.

    Options are ddp's; `bucket_cap_mb` is also the most that is packed into one gathering of small parameters.
    In place, beside what ddp does: the state of the user's optimizer moves into shards, and the optimizer takes a hook that
    refuses to step by itself. `step` and `state_dict` of the prepared optimizer are collectives: all ranks call them. Optimizers
    that keep parameters beside their param groups (LBFGS) are refused. Optimizers that are not torch's, Muon and Adafactor run on
    DTensors (easymp's Muon on their parts); one that DTensor has no rules for (Adafactor) is refused at its first step.
    """

    name: ClassVar[str] = "zero1"
    several: ClassVar[str] = "shards optimizer states over processes"
    no_join: ClassVar[str] = "every rank's step needs the other ranks' shards"

    no_step_in_backward = "steps the shards of all parameters together, and gathers them"

    join = Single.join

    def __init__(self, world: World, options: DistributedDataParallelKwargs) -> None:
        super().__init__(world, options)
        self._cap = int(options.bucket_cap_mb * 2**20)
        self._frozen: set[int] = (
            set()
        )  # ids of parameters that were frozen, so that ddp averages no gradients of them

    @staticmethod
    def layout(model: nn.Module, options: Any, size: int, local_size: int) -> Layout:
        packed = packed_at_once(
            [p for p in model.parameters() if p.requires_grad], int(options.bucket_cap_mb * 2**20)
        )
        return DDP.layout(model, options, size, local_size)._replace(
            states=chunk_elements(size), gathered=packed
        )

    def wrap(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], context: WrapContext
    ) -> nn.Module:
        refuse_sparse(model, "zero1 cuts dense ones only")
        module = super().wrap(model, optimizers, context)
        self._frozen.update(id(p) for p in model.parameters() if not p.requires_grad)
        return module

    def spread(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return ShardedOptimizer(optimizer, self._world, self._cap, self._frozen)

    def release(self, model: nn.Module, alone: nn.Module) -> nn.Module:
        self._frozen.difference_update(id(p) for p in model.parameters())
        return super().release(model, alone)
