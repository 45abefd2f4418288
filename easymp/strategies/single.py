"""single: one process, one device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..distributed import World
from ..options import DistributedDataParallelKwargs
from ..protocols import Counting, Facts, Layout, Manner, Refusal
from .norms import clip_whole


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
