"""local_sgd: every rank trains alone; models are averaged after every k-th update (Stich, 2018, arXiv:1805.09767).

Each rank clips by its own norm and keeps its own optimizer states. Under a loss scale all ranks skip a step if one
overflowed, so that their counts stay the same. With ``every=1`` and plain SGD it is ddp.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from ..distributed import World
from ..errors import EasympWarning, RefusedError, check_whole
from ..optim.torch_step import parameters_of
from ..options import Record, option
from ..protocols import Conflict, WrapContext
from .ddp import DDP
from .single import Framed, Remedy, Single, average, broadcast_model, without_masters


@dataclass(frozen=True)
class LocalSGDOptions(Record):
    """Options of strategy "local_sgd".

    Raises:
        SettingError: `every` is not an integer of 1 or more.

    Example:
        >>> settings = Settings(strategy="local_sgd", strategy_options=LocalSGDOptions(every=16))
    """

    every: int = option(8, "updates of an optimizer from one averaging to the next", least=1)


class LocalTraining(Single):
    """The model under autocast, trained by each rank alone and averaged now and then.

    The ranks average parameters and floating-point buffers after every `every`-th update of an optimizer (skipped ones
    do not count), at the end of a pass over a prepared loader, and in `wait_for_everyone`. All must make as many
    updates. In place: parameters and buffers take rank 0's values when wrapped.
    """

    name: ClassVar[str] = "local_sgd"
    several: ClassVar[str] = "averages models over processes"
    conflicts: ClassVar[Sequence[Conflict]] = (
        Conflict(
            "local_sgd", "join_uneven_inputs()", "models are averaged after as many updates on every rank", Remedy.JOIN
        ),
        *without_masters("local_sgd", "models are averaged, and fp32 masters would not know"),
    )
    Options: ClassVar[type] = LocalSGDOptions
    local_updates: ClassVar[bool] = True

    def __init__(self, world: World, options: LocalSGDOptions) -> None:
        super().__init__(world, options)
        self._models: list[nn.Module] = []
        self._updates: dict[Optimizer, int] = {}  # since the parameters of each were averaged

    def wrap(self, model: nn.Module, optimizers: Sequence[Optimizer], context: WrapContext) -> nn.Module:
        broadcast_model(model, self._world, context.place)
        self._models.append(model)
        return Framed(super().wrap(model, optimizers, context))

    def in_step(self, optimizer: Optimizer) -> bool:
        return not self._updates.get(optimizer)

    def count(self, optimizer: Optimizer) -> None:
        """Count an update of `optimizer`, and average its parameters after every `every`-th."""
        self._updates[optimizer] = self._updates.get(optimizer, 0) + 1
        if self._updates[optimizer] == self.options.every:
            self._average(optimizer)

    def _average(self, optimizer: Optimizer) -> None:
        self._updates[optimizer] = 0
        parameters = parameters_of(optimizer)
        ids = {id(p) for p in parameters}
        models = [m for m in self._models if any(id(p) in ids for p in m.parameters())]
        average([*parameters, *(b for m in models for b in m.buffers())], self._world)

    def settle(self) -> None:
        """Average all parameters that were trained since they were averaged."""
        for optimizer, updates in list(self._updates.items()):
            if updates:
                self._average(optimizer)

    def release(self, model: nn.Module, module: nn.Module) -> nn.Module:
        updates = max(self._updates.values(), default=0)
        self._updates.clear()
        self._models.clear()
        if updates:
            warnings.warn(
                f"the run releases models that differ between the ranks, after {updates} updates since they were last "
                "averaged. Call wait_for_everyone() after the last update, or read a prepared loader to its end",
                EasympWarning,
                stacklevel=2,
            )
        return module


class LocalSGD:
    """A context in which each rank trains a model alone.

    Parameters and floating-point buffers are averaged every `local_sgd_steps` calls of `step`, and at the end unless an
    exception ends the block. With ``DistributedDataParallelKwargs(static_graph=True)`` the very first backward of a
    model reduces its gradients. The context has no effect with one process.

    Args:
        accelerator: the one that prepared `model`, under strategy "ddp".
        model: the prepared model.
        local_sgd_steps: calls of `step` from one averaging to the next.
        enabled: False does nothing.

    Attributes:
        num_steps: calls of `step` so far.

    Raises:
        RefusedError: a strategy under which ranks do not hold and update the whole model by themselves.
        SettingError: `local_sgd_steps` is not an integer of 1 or more.

    Example:
        >>> with LocalSGD(acc, model, local_sgd_steps=8) as local:
        ...     acc.backward(model(torch.ones(1, 2)).sum())
        ...     optimizer.step()
        ...     local.step()
    """

    def __init__(self, accelerator: Any, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        check_whole(f"local_sgd_steps={local_sgd_steps!r}", local_sgd_steps)
        strategy = accelerator._prepared.strategy
        if enabled and type(strategy) not in (DDP, Single):
            raise RefusedError(
                "LocalSGD needs ranks that each hold the whole model and update it by themselves; strategy "
                f"{strategy.name!r} does otherwise. Use strategy='ddp', or strategy='local_sgd' without this block"
            )
        self.enabled = enabled and accelerator.num_processes > 1
        self.num_steps = 0
        self.local_sgd_steps = local_sgd_steps
        self.accelerator = accelerator
        self.model = model
        self._no_sync: AbstractContextManager[Any] = nullcontext()

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._no_sync = self.accelerator.no_sync(self.model)
        self._no_sync.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        try:
            if kind is None:
                self._average()
        finally:
            self._no_sync.__exit__(kind, *error)

    def step(self) -> None:
        """Count one step; averages the model after every `local_sgd_steps`-th."""
        self.num_steps += 1
        if self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        if self.enabled:
            average([*self.model.parameters(), *self.model.buffers()], self.accelerator._world)
