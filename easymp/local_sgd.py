"""LocalSGD: local updates for a while, over a model prepared with ddp; by the peer's name and calls."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

from torch import nn

from .accelerator import Accelerator
from .errors import RefusedError
from .strategies.ddp import DDP
from .strategies.local_sgd import average, check_every
from .strategies.single import Single


class LocalSGD:
    """Inside, each rank trains `model` alone; it is averaged over the ranks every `local_sgd_steps` calls of `step`, and at the end.

    Averaged are parameters and floating-point buffers. Leaving by an exception averages nothing. With
    ``DistributedDataParallelKwargs(static_graph=True)`` the very first backward of a model reduces its gradients all the same. Does
    nothing with one process.

    Args:
        accelerator: has prepared `model`, under strategy "ddp".
        local_sgd_steps: calls of `step` from one averaging to the next.
        enabled: False does nothing.

    Attributes:
        num_steps: calls of `step` so far.

    Raises:
        RefusedError: a strategy under which ranks do not each hold the whole model and update it by themselves.
        SettingError: `local_sgd_steps` is no whole number of at least 1.
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True
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
