"""ddp: every rank holds the whole model; gradients are averaged while backward runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from ..protocols import Facts, Layout, Manner, Refusal
from ..records import DistributedDataParallelKwargs
from ..world import World


class DDP:
    """torch's DistributedDataParallel, around the model under autocast.

    In place, by torch: parameters and buffers take rank 0's values when wrapped. A model without trainable parameters is
    left unwrapped, for there is nothing to average.
    """

    name: ClassVar[str] = "ddp"
    Options: ClassVar[type] = DistributedDataParallelKwargs
    whole: ClassVar[bool] = True
    masters: ClassVar[bool] = True
    sums = True

    def __init__(self, world: World, options: DistributedDataParallelKwargs) -> None:
        self.data_rank, self.data_size = world.rank, world.size
        self.data_group = None
        self._world = world
        self._device = world.device
        self._options = options
        self._reduced: set[int] = set()  # models whose gradients have been reduced once

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        if facts.world_size == 1:
            return Refusal(
                "strategy 'ddp' averages gradients over processes, and there is one",
                "start several (`easymp launch --processes N script.py`), or use 'auto'",
            )
        return None

    @staticmethod
    def layout(model: nn.Module, options: Any, size: int, local_size: int) -> Layout:
        buckets = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return Layout(reducing=0 if options.gradient_as_bucket_view else buckets)

    def wrap(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], manner: Manner) -> nn.Module:
        if manner.place:
            model.to(self._device)
        module = manner.policy.forward(manner.policy.convert(model), self._device)
        if any(p.requires_grad for p in model.parameters()):
            on_gpu = manner.place and self._device.type in ("cuda", "xpu")
            options = asdict(self._options)
            if options["broadcast_buffers"]:
                del options["broadcast_buffers"]  # torch's default; naming it warns from 2.13 on
            module = DistributedDataParallel(module, device_ids=[self._device] if on_gpu else None, **options)
        manner.compile(module)
        return module

    def spread(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        if not isinstance(model, DistributedDataParallel):
            return nullcontext()
        if self._options.static_graph and id(model) not in self._reduced:
            # torch's reducer needs one reduced iteration before it may skip one. Reducing early changes no result:
            # the average over ranks of an average is that average.
            self._reduced.add(id(model))
            return nullcontext()
        return model.no_sync()

    @contextmanager
    def force_sync(self, model: nn.Module) -> Iterator[None]:
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        before = model.require_backward_grad_sync
        model.require_backward_grad_sync = True
        model.reducer.prepare_for_backward([])  # what forward does when it expects a reduction
        try:
            yield
        finally:
            model.require_backward_grad_sync = before

    def average(self, models: Sequence[nn.Module], gradients: Sequence[Tensor]) -> None:
        self._world.average_(gradients)
        for model in models:
            if isinstance(model, DistributedDataParallel):
                model.require_forward_param_sync = True  # buffers: what forward does when it expects a reduction

    def join(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        return Join([m for m in models if isinstance(m, DistributedDataParallel)])

    def clip(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def release(self, model: nn.Module, alone: nn.Module) -> nn.Module:
        return alone
