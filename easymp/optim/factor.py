"""What a clip leaves to the step: a factor, and the gradients that it is for, which stay in memory as backward left them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..base.dtensor import local
from ..errors import StepError
from ..precision import Scaler
from ..precision.scaler import NO_GRADIENTS, Phase
from .torch_step import multiply

if TYPE_CHECKING:
    from .optimizer import PreparedOptimizer


class Factor:
    """What an optimizer's gradients are to be multiplied by.

    Attributes:
        value: float32, 0-dim, on the device.
    """

    def __init__(self, value: Tensor, gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.value = value
        parts = [local(gradient) for _, gradient in gradients]
        self._seen = [(p, gradient, part, part._version) for (p, gradient), part in zip(gradients, parts)]

    def check(self) -> None:
        """Before the step multiplies by it.

        Raises:
            StepError: gradients are not those that were measured.
        """
        self._unchanged()

    def apply(self) -> None:
        """Multiply in memory, as if there were no factor. Gradients that were cleared since stay cleared.

        Raises:
            StepError: gradients are not those that were measured.
        """
        multiply(self._unchanged(), self.value)

    def _unchanged(self) -> list[Tensor]:
        """The gradients that are still there."""
        there = []
        for parameter, gradient, part, version in self._seen:
            now = parameter.grad
            if now is gradient and part._version == version:
                there.append(gradient)
            elif now is not None and bool(local(now.detach()).any()):
                raise StepError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} was changed between clip_grad_norm_ and step(). There "
                    "it is neither clipped nor divided by the loss scale yet, for the step does both as it reads: change gradients "
                    "before you clip, or use Accelerator(fused=False)"
                )
        return there


@torch.no_grad()
def leave_to_step(optimizers: Sequence[PreparedOptimizer], max_norm: float, scaler: Scaler) -> Tensor:
    """Measure all gradients of `optimizers`, which take factors, and leave them the factor; returns the norm (0-dim, float32).

    Under a loss scale the norm is that of the gradients divided by it, and an overflow in any of them skips the steps of all.

    Raises:
        StepError: under a loss scale: there are no gradients on any rank.
    """
    counting = optimizers[0].engine.counting
    for optimizer in optimizers if counting.add is not None else ():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                counting.settle(parameter)
    found = [o.engine.gradients() for o in optimizers]
    here = any(found)
    scale = scaler.scale_of([o.optimizer for o in optimizers], here)
    others: list[Tensor] = []
    for optimizer in optimizers[:-1]:
        optimizer.engine.measure(max_norm, scale, others.append)

    anywhere: list[Tensor] = []  # how many ranks hold gradients

    def over_ranks(totals: Tensor) -> None:
        for other in others:
            totals += other.to(totals.device)
        if counting.add is not None:
            both = torch.cat([totals, totals.new_full((1,), float(here))])
            counting.add(both)
            totals.copy_(both[:2])
            anywhere.append(both[2])

    alone = not others and counting.add is None
    result = optimizers[-1].engine.measure(max_norm, scale, None if alone else over_ranks)
    bad = result.found_inf
    if scale is not None:
        assert bad is not None
        if counting.add is None:
            bad = scaler.agreed(bad, here)
        elif not here and not anywhere[0].item():
            raise StepError(NO_GRADIENTS)
    scaler.take([o.optimizer for o in optimizers], bad if scale is not None else None)
    for optimizer, gradients in zip(optimizers, found):
        optimizer.leave(Factor(result.factor, gradients))
    return result.norm


def may_leave(optimizers: Sequence[PreparedOptimizer], scaler: Scaler) -> bool:
    """Whether `leave_to_step` is for these now. The same on all ranks."""
    if not optimizers or any(o.factor is not None or not o.engine.takes_factor() for o in optimizers):
        return False
    if len({o.engine.counting.add is None for o in optimizers}) > 1:
        return False
    phases = {scaler.phase(o.optimizer) for o in optimizers}
    return len(phases) == 1 and Phase.STEPPED not in phases
