"""LARC: "Large Batch Training of Convolutional Networks", You, Gitman and Ginsburg, arXiv:1708.03888, as Apex's wrapper has it.

Each tensor's gradient, weight decay in it, is multiplied by trust × |p| / (|g| + decay × |p| + eps); with `clip`, by this ratio over lr, at
most 1. Another optimizer does the rest, without decay. A tensor whose norm is 0, or its gradient's, has neither factor nor decay.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from ..base.dtensor import local, meshes
from ..errors import RefusedError
from .fused import FusedOptimizer, Options, StepChoice
from .torch_optimizers import swapped
from .torch_step import HOOKS, whole_squares, wide

_OWN = ("optim", "trust", "options", *HOOKS)


class LARC(FusedOptimizer):
    """Another optimizer, with a learning rate for each parameter that its norm and its gradient's allow.

    A gradient is multiplied, decay in it, by min(1, trust_coefficient × |p| / (|g| + weight_decay × |p| + eps) / lr) (You, Gitman and
    Ginsburg, arXiv:1708.03888). Param groups, state and checkpoints are those of the optimizer inside. Of sharded parameters (DTensors) the
    norms are those of the whole tensors. The norms are torch's; the optimizer inside steps by kernels where it can.

    Args:
        optimizer: one of torch's classes or of ours; its weight decay is left to LARC.
        trust_coefficient: of the ratio of norms.
        clip: False leaves out the min and / lr: lr is multiplied by the ratio.
        eps: added to the norms.

    Raises:
        RefusedError: an optimizer that scales by norms of tensors itself.

    Example:
        >>> from easymp.optim import LARC
        >>> parameter = nn.Parameter(torch.ones(1))
        >>> optimizer = LARC(torch.optim.SGD([parameter], lr=1.0), trust_coefficient=0.02)
        >>> parameter.sum().backward()
        >>> optimizer.step()
        >>> parameter.data
        tensor([0.9800])
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        # torch's own __init__ would build param groups and state a second time.
        self.optim = optimizer
        self.trust = trust_coefficient, clip, eps
        ours = isinstance(optimizer, FusedOptimizer)
        if isinstance(optimizer, LARC) or (ours and optimizer.rule.survey is not None):
            raise RefusedError(
                f"{type(optimizer).__name__} scales by the norms of tensors already: LARC is for optimizers that do not"
            )
        self.options = optimizer.options if ours else Options()
        for name in HOOKS:
            setattr(self, name, OrderedDict())
        self._patch_step_function()

    def _choose(self, wanted: bool) -> StepChoice:
        return self._by_torch(
            "LARC's norms are torch's, and the optimizer inside steps as its own engine says"
        )

    def round_from(self, seed: int) -> bool:
        return self.options.rounding is not None

    def advance(self, factor: Tensor | None, found_inf: Tensor | None, result: Tensor | None = None) -> None:
        self._meshes = meshes(self._parameters())
        parameters = [p for p in self._parameters() if p.grad is not None]
        if not parameters:
            return
        held: list[Any] = [p.grad for p in parameters]
        gradients = [g.to_dense() if g.is_sparse else g for g in held]
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        weights = whole_squares(parameters, parameters).sqrt()
        slopes = whole_squares(parameters, gradients).sqrt()
        if factor is not None:
            gradients = list(torch._foreach_mul(gradients, factor))
            slopes = slopes * factor.to(slopes.device)
        try:
            for p, g, weight, slope in zip(
                parameters, gradients, weights.float().unbind(), slopes.float().unbind()
            ):
                new = self._adapted(
                    local(p), local(g), weight.to(p.device), slope.to(p.device), groups[id(p)]
                )
                p.grad = torch.empty_like(g, dtype=p.dtype)
                local(p.grad).copy_(new)
            with swapped(self.param_groups, "weight_decay", 0.0):
                self._step_inside(found_inf)
        finally:
            for parameter, gradient in zip(parameters, held):
                parameter.grad = gradient

    def _adapted(self, p: Tensor, g: Tensor, weight: Tensor, slope: Tensor, group: dict[str, Any]) -> Tensor:
        """The gradient for the optimizer inside, of a tensor with the norm `weight` and a gradient with the norm `slope`."""
        coefficient, clip, eps = self.trust
        decay = group.get("weight_decay", 0.0)
        factor = coefficient * weight / (slope + weight * decay + eps)
        if clip:
            factor = (factor / group["lr"]).clamp(max=1.0)
        moves = (weight > 0) & (slope > 0)
        pull = torch.where(moves, -decay if group.get("maximize") else decay, 0.0)
        return (wide(g) + pull * wide(p)) * torch.where(moves, factor, 1.0)

    def _step_inside(self, found_inf: Tensor | None) -> None:
        if isinstance(self.optim, FusedOptimizer):
            self.optim.advance(None, found_inf)
        elif found_inf is None or not found_inf.item():
            self.optim.step()

    # -- attributes and state, of the optimizer inside ------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optim.defaults

    def state_dict(self) -> dict[str, Any]:
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def __repr__(self) -> str:
        return f"LARC({self.optim!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in _OWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._patch_step_function()
