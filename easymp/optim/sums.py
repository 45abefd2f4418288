"""fp32 sums of low-precision gradients over an accumulation window.

A bf16 number has 8 bits of mantissa: of a sum of a hundred micro-batches' gradients in bf16, the later ones are mostly lost. So under
accumulation each micro-step's gradients leave `.grad` for an fp32 sum, which stays on this rank; at the end of the window the sums are
averaged over the ranks, in fp32, once, and only then become `.grad` in the parameter's type, or the gradient of its master.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .. import cuda
from .masters import LOW, added

if TYPE_CHECKING:
    from ..cuda.casts import Adder


class Sums:
    """The sums of one run.

    Attributes:
        on: whether there is a model that needs them; until then none of the methods need be called.

    Args:
        masters: id of a parameter → its master.
    """

    def __init__(self, masters: Mapping[int, Tensor]) -> None:
        self.on = False
        self._masters = masters
        self._parameters: list[Tensor] = []  # all that may train, low-precision or not
        self._sums: dict[Tensor, Tensor] = {}
        self._handed = False

    @cached_property
    def _adder(self) -> Adder:
        return cuda.Adder()

    def watch(self, model: nn.Module) -> bool:
        """Sum for `model`, too; returns whether it has trainable low-precision parameters."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._parameters += parameters
        needed = any(p.dtype in LOW for p in parameters)
        self.on |= needed
        return needed

    def begin(self) -> None:
        """Before a backward: sums that an earlier one of this micro-step has handed over are taken up again."""
        if not self._handed:
            return
        self._handed = False
        for parameter in list(self._sums):
            if self._holder(parameter).grad is None:
                del self._sums[parameter]  # cleared since
            else:
                parameter.grad = None

    @torch.no_grad()
    def add(self) -> None:
        """After a backward: move its gradients into the sums.

        Raises:
            StepError: a sparse gradient.
        """
        fresh = [p for p in self._parameters if p.grad is not None and p.dtype in LOW]
        totals = added(self._adder, [p.grad for p in fresh], [self._sums.get(p) for p in fresh])
        for parameter, total in zip(fresh, totals):
            self._sums[parameter], parameter.grad = total, None

    @torch.no_grad()
    def average(self, over_ranks: Callable[[Sequence[Tensor]], None]) -> None:
        """Make the sums, and the gradients that are fp32 anyway, the mean over the ranks.

        A parameter that had no gradient on any rank still has none afterwards; all ranks go through the same collectives.

        Args:
            over_ranks: averages tensors in place.
        """
        trainable = [p for p in self._parameters if p.requires_grad]
        if not trainable:
            return
        found = [self._sums.get(p) if p.dtype in LOW else p.grad for p in trainable]
        there = torch.tensor([float(g is not None) for g in found], device=trainable[0].device)
        mine = [
            torch.zeros_like(p, dtype=torch.float32 if p.dtype in LOW else p.dtype) if g is None else g
            for p, g in zip(trainable, found)
        ]
        over_ranks([*mine, there])
        if all(g is not None for g in found):
            return  # no wait for the device
        for parameter, before, after, share in zip(trainable, found, mine, there.tolist()):
            if before is None and share > 0:
                if parameter.dtype in LOW:
                    self._sums[parameter] = after
                else:
                    parameter.grad = after

    def gradients(self) -> Iterator[Tensor]:
        """The sums."""
        return iter(self._sums.values())

    def hand_over(self) -> None:
        """At the end of a window: the sums become gradients."""
        for parameter, total in self._sums.items():
            holder = self._holder(parameter)
            holder.grad = total if holder is not parameter else total.to(parameter.dtype)
        self._handed = True

    def drop(self, parameters: Iterable[Tensor]) -> None:
        """Forget the sums of these: they have been stepped on, or cleared."""
        for parameter in parameters:
            self._sums.pop(parameter, None)

    def clear(self) -> None:
        """Forget everything, the models too."""
        self.on = self._handed = False
        self._parameters.clear()
        self._sums.clear()

    def _holder(self, parameter: Tensor) -> Tensor:
        return self._masters.get(id(parameter), parameter)
