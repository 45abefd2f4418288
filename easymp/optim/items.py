"""A loss summed over items (tokens, pixels), divided by the number of items in the whole window on all ranks.

With micro-batches m and ranks r the gradient of one big batch is Σ_m,r ∂loss_sum / Σ_m,r items. A mean a micro-batch, averaged,
is something else as soon as the counts differ. The divisor is known only when the window ends; until then the first
micro-step's count stands in for it, so that numbers keep their usual size, and the gradients are corrected by one factor.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..base.accumulation import StepClock
from ..base.dtensor import local
from ..distributed import World
from ..errors import StepError


class ItemWindow:
    """Counts the items of a window.

    Gradients are averaged over the ranks, which is undone here, since counts are summed. Where several ranks see the same data,
    fewer are averaged and each item is counted several times: the one makes up for the other.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._stand_in: Tensor | None = None
        self._count: Tensor | None = None
        self.open = False  # a window with more than one micro-step is being counted

    def divide(self, loss: Tensor, items: int | Tensor, clock: StepClock) -> Tensor:
        """`loss`, a sum over `items` items of this rank, ready for backward.

        Raises:
            StepError: a second backward in one micro-step of several, whose items would count twice.
        """
        if clock.inside and clock.accumulation != 1 and clock.backwards:
            raise StepError(
                "a second backward() with num_items in one micro-step: its items would be counted twice. Add the losses up and "
                "call backward() once"
            )
        if clock.micro <= 1:
            self.open = False  # what a window left behind that was never finished
        here = number(items, loss.device)
        if not self.open:
            total = self._world.reduce(here).clamp(min=1.0)
            if clock.sync and clock.micro <= 1:
                return loss * (self._world.size / total)
            self._stand_in = total * clock.accumulation
            self._count = torch.zeros_like(here)
            self.open = True
        assert self._count is not None
        self._count += here
        return loss * (self._world.size / self._stand_in)

    def finish(self, gradients: Iterable[Tensor]) -> None:
        """Correct the gradients of a window that has ended, after the last backward."""
        assert self._count is not None
        factor = self._stand_in / self._world.reduce(self._count).clamp(min=1.0)
        grads = [local(g) for g in gradients]
        if grads:
            torch._foreach_mul_(grads, factor)
        self.open = False


def number(value: float | Tensor, device: torch.device) -> Tensor:
    """`value` as an fp32 tensor on `device`. One that the host has is written there by a kernel: to copy it is to wait for the device."""
    if isinstance(value, Tensor) and (value.numel() != 1 or value.device.type != "cpu"):
        return value.to(device, torch.float32)
    shape = value.shape if isinstance(value, Tensor) else ()
    return torch.full(shape, float(value), dtype=torch.float32, device=device)
