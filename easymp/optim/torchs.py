"""Optimizers that torch has, too, stepped by our kernels where they run. Elsewhere by torch's own step, fused if it can.

Each is of torch's class, with its options, its state and its checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from .fusing import FusedOptimizer, Way
from .torch_step import fill_momentum, fuse, multiply


class TorchsOptimizer(FusedOptimizer):
    """An optimizer that torch has, too.

    Attributes:
        torchs: its class there.
    """

    torchs: ClassVar[type[torch.optim.Optimizer]]
    _fused_here: bool = False  # whether the fused step was our choice

    def _otherwise(self, reason: str) -> Way:
        if self.options.state_dtype is not None or self.options.rounding is not None:
            return Way(
                "torch",
                f"{reason}; torch has no step for states of their own dtype, nor for stochastic rounding",
            )
        for group in self.param_groups if self._fused_here else ():
            group["fused"] = None  # by us, when the parameters lay elsewhere
        self._fused_here = False
        if all(group.get("fused") is None and group.get("foreach") is None for group in self.param_groups):
            why_not = fuse(self, kind=self.torchs)
            self._fused_here = why_not is None
            if why_not is not None:
                return Way("torch", f"{reason}; {why_not}")
        fused = all(group.get("fused") for group in self.param_groups)
        return Way("torch fused" if fused else "torch", reason)

    def advance_by_torch(
        self, parameters: Sequence[Any], factor: Tensor | None, found_inf: Tensor | None
    ) -> None:
        if self.options.state_dtype is not None or self.options.rounding is not None:
            return self.widened.step(parameters, factor, found_inf)
        step = self.torchs.step
        if getattr(step, "hooked", False):
            step = step.__wrapped__  # type: ignore[attr-defined]  # the hooks have been called with our own step
        hidden = self._hide_all_but(parameters)
        try:
            if all(group.get("fused") for group in self.param_groups) and not any(
                p.grad.is_sparse for p in parameters
            ):
                fill_momentum(self, self.torchs)
                self._told(step, None if factor is None else factor.reciprocal(), found_inf)
            elif found_inf is None or not found_inf.item():
                if factor is not None:
                    multiply([p.grad for p in parameters], factor)
                with self._plain():
                    self._told(step, None, None)
        finally:
            for parameter, gradient in hidden:
                parameter.grad = gradient

    @contextmanager
    def _plain(self) -> Iterator[None]:
        """torch's step that is not fused, which takes sparse gradients."""
        asked = [group["fused"] for group in self.param_groups]
        for group in self.param_groups:
            group["fused"] = False
        try:
            yield
        finally:
            for group, fused in zip(self.param_groups, asked):
                group["fused"] = fused

    def _hide_all_but(self, parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        mine = {id(p) for p in parameters}
        hidden = [(p, p.grad) for p in self._parameters() if p.grad is not None and id(p) not in mine]
        for parameter, _ in hidden:
            parameter.grad = None
        return hidden

    def _told(self, step: Any, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """torch's step, which reads these where it is fused."""
        given = {name: vars(self)[name] for name in ("grad_scale", "found_inf") if name in vars(self)}
        vars(self).update(grad_scale=grad_scale, found_inf=found_inf)
        try:
            step(self)
        finally:
            for name in ("grad_scale", "found_inf"):
                del vars(self)[name]
            vars(self).update(given)
