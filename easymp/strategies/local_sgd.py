"""local_sgd: every rank trains alone; models are averaged after every k-th update (Stich, 2018, arXiv:1805.09767).

Gradients are not communicated, which helps on slow connections. Each rank clips by its own norm and keeps its own optimizer states
(momentum, Adam's moments). Under a loss scale all ranks skip a step if one overflowed, so that their counts stay the same. With
``every=1`` and plain SGD it is ddp.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from ..distributed import World
from ..errors import EasympWarning, RefusedError, SettingError
from ..protocols import WrapContext
from .ddp import DDP
from .single import Framed, Single, average, take_rank_0s


@dataclass(frozen=True)
class LocalSGDOptions:
    """Options of strategy "local_sgd".

    Attributes:
        every: updates of an optimizer from one averaging to the next.

    Raises:
        SettingError: `every` is not an integer of 1 or more.

    Example:
        >>> settings = Settings(strategy="local_sgd", strategy_options=LocalSGDOptions(every=16))
    """

    every: int = 8

    def __post_init__(self) -> None:
        check_every("every", self.every)


def check_every(name: str, every: Any) -> None:
    if type(every) is not int or every < 1:
        raise SettingError(f"{name}={every!r} is not a whole number of updates of at least 1")


class LocalTraining(Single):
    """The model, under autocast, on every rank by itself.

    The ranks average the parameters of a prepared optimizer, and the floating-point buffers of their models: after every
    `every`-th of its updates (skipped ones do not count), at the end of a pass over a prepared loader, and in
    `wait_for_everyone`. So models are equal on all ranks after a pass; where training ends in the middle of one, call
    `wait_for_everyone` before using the model. Every rank must make as many updates as the others.

    In place: parameters and buffers take rank 0's values when wrapped; each optimizer gets a hook (``register_step_post_hook``), which
    is removed when the run lets go of it.
    """

    name: ClassVar[str] = "local_sgd"
    traffic = None
    several: ClassVar[str] = "averages models over processes"
    no_join: ClassVar[str] = "models are averaged after as many updates on every rank"
    Options: ClassVar[type] = LocalSGDOptions
    local_updates: ClassVar[bool] = True
    masters: ClassVar[bool] = False  # parameters are averaged, and masters would not know

    def __init__(self, world: World, options: LocalSGDOptions) -> None:
        self.data_rank, self.data_size = world.rank, world.size
        super().__init__(world, options)
        self._models: list[nn.Module] = []
        self._updates: dict[Optimizer, int] = {}  # of each, since its parameters were averaged
        self._hooks: list[Any] = []
        self.averaged: Callable[[Optimizer], None] = lambda optimizer: None  # called after each
        world.settling.append(self._settle)

    def wrap(self, model: nn.Module, optimizers: Sequence[Optimizer], context: WrapContext) -> nn.Module:
        take_rank_0s(model, self._world, context.place)
        self._models.append(model)
        return Framed(super().wrap(model, optimizers, context))

    def spread(self, optimizer: Optimizer) -> Optimizer:
        self._updates[optimizer] = 0
        self._hooks.append(optimizer.register_step_post_hook(self._stepped))
        return optimizer

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # After an overflow, a fused optimizer's step runs without an effect; any other one's does not run.
        found = getattr(optimizer, "found_inf", None)
        if found is None or not found.item():
            self._updates[optimizer] += 1
            if self._updates[optimizer] == self.options.every:
                self._average(optimizer)

    def _average(self, optimizer: Optimizer) -> None:
        self._updates[optimizer] = 0
        held = [p for group in optimizer.param_groups for p in group["params"]]
        mine = {id(p) for p in held}
        models = [m for m in self._models if any(id(p) in mine for p in m.parameters())]
        average([*held, *(b for m in models for b in m.buffers())], self._world)
        self.averaged(optimizer)

    def _settle(self) -> None:
        for optimizer in [optimizer for optimizer, updates in self._updates.items() if updates]:
            self._average(optimizer)

    def release(self, model: nn.Module, alone: nn.Module) -> nn.Module:
        left = max(self._updates.values(), default=0)
        for hook in self._hooks:
            hook.remove()
        for kept in (self._hooks, self._updates, self._models):
            kept.clear()
        if left:
            warnings.warn(
                f"the run lets go of models that are not the same on all ranks: they were trained for {left} updates since they were last "
                "averaged. Call wait_for_everyone() after the last update, or read a prepared loader to its end",
                EasympWarning,
                stacklevel=2,
            )
        return alone


class LocalSGD:
    """Inside, each rank trains a model alone. Models are averaged every `local_sgd_steps` calls of `step`, and at the end.

    It averages parameters and floating-point buffers. Leaving by an exception averages nothing. With
    ``DistributedDataParallelKwargs(static_graph=True)`` the very first backward of a model reduces its gradients. It has no effect
    with one process.

    Args:
        accelerator: has prepared `model`, under strategy "ddp".
        model: the prepared model.
        local_sgd_steps: calls of `step` from one averaging to the next.
        enabled: False does nothing.

    Attributes:
        num_steps: calls of `step` so far.

    Raises:
        RefusedError: a strategy under which ranks do not each hold the whole model and update it by themselves.
        SettingError: `local_sgd_steps` is not an integer of 1 or more.

    Example:
        >>> acc = Accelerator(cpu=True)
        >>> model = nn.Linear(2, 1)
        >>> model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters()))
        >>> with LocalSGD(acc, model, local_sgd_steps=8) as local:
        ...     acc.backward(model(torch.ones(1, 2)).sum())
        ...     optimizer.step()
        ...     local.step()
    """

    def __init__(
        self, accelerator: Any, model: nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        check_every("local_sgd_steps", local_sgd_steps)
        strategy = accelerator._prepared.strategy
        if enabled and type(strategy) not in (DDP, Single):
            raise RefusedError(
                f"LocalSGD needs ranks that each hold the whole model and update it by themselves; strategy {strategy.name!r} does "
                "otherwise. Use strategy='ddp', or strategy='local_sgd' without this block"
            )
        self.enabled = enabled and accelerator.num_processes > 1
        self.num_steps = 0
        self.local_sgd_steps = local_sgd_steps
        self.accelerator = accelerator
        self.model = model
        self._inside = ExitStack()

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._inside.enter_context(self.accelerator.no_sync(self.model))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._inside:
            if kind is None:
                self._average()

    def step(self) -> None:
        """Count one step; averages the model after every `local_sgd_steps`-th."""
        self.num_steps += 1
        if self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        if self.enabled:
            average([*self.model.parameters(), *self.model.buffers()], self.accelerator._world)
