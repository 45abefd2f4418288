"""LARC: each parameter's learning rate is limited by the norms of the parameter and of its gradient, as in Apex."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from ..base.dtensor import local
from ..errors import RefusedError
from .engine import Engine
from .torch_step import HOOKS, OwnOptimizer, WrappingOptimizer, parameters_of, sums_of_squares, swapped, wide


class LARC(WrappingOptimizer, OwnOptimizer):
    """Another optimizer, with a rate for each parameter that its norm and its gradient's allow (arXiv:1708.03888).

    A gradient is multiplied, decay in it, by min(1, trust_coefficient × |p| / (|g| + weight_decay × |p| + eps) / lr). A
    tensor whose norm is 0, or its gradient's, has neither factor nor decay. Param groups, state and checkpoints are
    those of the optimizer inside, which steps by kernels where it can. Of sharded parameters (DTensors) the norms are
    those of the whole tensors.

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

    _engine: tuple[torch.device | None, Engine] | None = None

    def __init__(
        self, optimizer: torch.optim.Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        self.optim = optimizer
        self.trust = trust_coefficient, clip, eps
        rule = optimizer.rule if isinstance(optimizer, OwnOptimizer) else None
        if isinstance(optimizer, LARC) or (rule is not None and rule.survey is not None):
            kind = type(optimizer).__name__
            raise RefusedError(f"{kind} scales by the norms of tensors already: LARC is for optimizers that do not")
        for name in HOOKS:
            setattr(self, name, OrderedDict())
        self._patch_step_function()

    @property
    def engine(self) -> Engine:
        """Runs the step of the optimizer inside, where its parameters are now."""
        device = next((p.device for p in parameters_of(self.optim)), None)
        if self._engine is None or self._engine[0] != device:
            self._engine = device, Engine(self.optim)
        return self._engine[1]

    def advance(self, factor: Tensor | None, found_inf: Tensor | None) -> None:
        parameters = [p for p in parameters_of(self) if p.grad is not None]
        if not parameters:
            return
        originals: list[Any] = [p.grad for p in parameters]
        gradients = [g.to_dense() if g.is_sparse else g for g in originals]
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        weights = sums_of_squares(parameters, parameters).sqrt()
        slopes = sums_of_squares(parameters, gradients).sqrt()
        if factor is not None:
            gradients = list(torch._foreach_mul(gradients, factor))
            slopes = slopes * factor.to(slopes.device)
        try:
            for p, g, weight, slope in zip(parameters, gradients, weights.float().unbind(), slopes.float().unbind()):
                new = self._adapted(local(p), local(g), weight.to(p.device), slope.to(p.device), groups[id(p)])
                p.grad = torch.empty_like(g, dtype=p.dtype)
                local(p.grad).copy_(new)
            with swapped(self.param_groups, "weight_decay", 0.0):
                self.engine.step(None, found_inf)
        finally:
            for parameter, gradient in zip(parameters, originals):
                parameter.grad = gradient

    def _adapted(self, p: Tensor, g: Tensor, weight: Tensor, slope: Tensor, group: dict[str, Any]) -> Tensor:
        """The gradient for the optimizer inside. `weight` and `slope` are the norms of `p` and `g`."""
        coefficient, clip, eps = self.trust
        decay = group.get("weight_decay", 0.0)
        factor = coefficient * weight / (slope + weight * decay + eps)
        if clip:
            factor = (factor / group["lr"]).clamp(max=1.0)
        moves = (weight > 0) & (slope > 0)
        pull = torch.where(moves, -decay if group.get("maximize") else decay, 0.0)
        return (wide(g) + pull * wide(p)) * torch.where(moves, factor, 1.0)

    @property
    def optimizer(self) -> torch.optim.Optimizer:  # type: ignore[override]
        return self.optim

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"LARC({self.optim!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("optim", "trust", *HOOKS)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._patch_step_function()
