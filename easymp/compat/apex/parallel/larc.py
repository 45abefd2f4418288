"""LARC: the library's own, around optimizers that amp has initialised, too."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....optim import larc
from ..amp.optimizers import Stepping


class LARC(larc.LARC):
    """Another optimizer, whose learning rate for each parameter is limited by its norm and its gradient's; see `easymp.optim.LARC`.

    Before `amp.initialize` or after it.

    Args:
        optimizer: any of torch's classes, or of `apex.optimizers` without norms of their own.
        trust_coefficient: of the ratio of norms.
        clip: False scales the learning rate by the ratio, whatever it is.
        eps: beside the norms.
    """

    def _step_inside(self, found_inf: Tensor | None) -> None:
        if isinstance(self.optim, Stepping):
            self.optim.step()  # which knows of overflows and masters
        else:
            super()._step_inside(found_inf)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().step(*args, **kwargs)
        if isinstance(self.optim, Stepping) and self.optim._amp.masters is not None:
            self.optim._amp.masters.clear()  # gradients that were put back behind the step inside
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        if isinstance(self.optim, Stepping):
            self.optim.zero_grad(set_to_none)
        super().zero_grad(set_to_none)
