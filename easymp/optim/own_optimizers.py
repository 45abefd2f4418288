"""Optimizers that torch does not have: Lion, LAMB and NovoGrad, each a rule of `rules.py` and a class; and LARC.

LAMB, NovoGrad and LARC scale the length of a step tensor by tensor, by norms, as in Apex.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any, Never

import torch
from torch import Tensor

from ..base.dtensor import local
from ..errors import RefusedError, SettingError
from . import rules
from .engine import Engine
from .rules import RuleOptimizer
from .torch_step import HOOKS, OwnOptimizer, WrappingOptimizer, parameters_of, sums_of_squares, wide, without_decay


class Lion(RuleOptimizer):
    """p -= lr × (sign(β1 m + (1 - β1) g) + weight_decay × p), then m = β2 m + (1 - β2) g (arXiv:2302.06675).

    The paper's advice: a third to a tenth of AdamW's lr, and as much more weight decay. State: ``exp_avg``.

    Args:
        params: as in torch.
        lr: length of a step of each weight.
        betas: β1 and β2.
        weight_decay: factor of the decoupled decay.
        maximize: move against the gradient's sign.
        fused: False keeps an `Engine` to torch's operations.
        removed: options of earlier versions, which are refused.

    Raises:
        SettingError: a number is out of range, or a parameter is not a real float.

    Example:
        >>> from easymp.optim import Lion
        >>> parameter = nn.Parameter(torch.ones(1))
        >>> optimizer = Lion([parameter], lr=0.1)
        >>> parameter.sum().backward()
        >>> optimizer.step()
        >>> parameter.data
        tensor([0.9000])
    """

    rule = rules.LION

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        fused: bool | None = None,
        **removed: Never,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize, "fused": fused}
        super().__init__(params, defaults, removed)


class LAMB(RuleOptimizer):
    """AdamW's direction, with a length of lr × |p| a tensor; options and defaults of Apex FusedLAMB (arXiv:1904.00962).

    State: ``step``, ``exp_avg``, ``exp_avg_sq``. Of sharded parameters (DTensors) the norms are those of the whole
        tensors.

    Args:
        params: as in torch.
        lr: length of a step, relative to the norm of the tensor.
        bias_correction: of both averages.
        betas: decay of the averages of gradients and of their squares.
        eps: added to the root of the second average.
        weight_decay: factor of the decay.
        adam_w_mode: decay beside the gradient; else as a part of it (L2).
        grad_averaging: False adds the gradient to the first average whole.
        max_grad_norm: gradients are clipped first, by the norm of those of all groups; None: not.
        use_nvlamb: let tensors without weight decay have a ratio, too.
        maximize: move against the gradient's sign.
        fused: False keeps an `Engine` to torch's operations.
        removed: options of earlier versions, which are refused.

    Raises:
        SettingError: a number is out of range, or a parameter is not a real float.

    Example:
        >>> from easymp.optim import LAMB
        >>> parameter = nn.Parameter(torch.full((2,), 10.0))
        >>> optimizer = LAMB([parameter], lr=0.1)
        >>> parameter.sum().backward()
        >>> optimizer.step()  # by 0.1 × |p|
        >>> parameter.data
        tensor([9., 9.])
    """

    rule = rules.LAMB

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        maximize: bool = False,
        fused: bool | None = None,
        **removed: Never,
    ) -> None:
        defaults: dict[str, Any] = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        defaults |= {"weight_decay": weight_decay, "adam_w_mode": adam_w_mode, "grad_averaging": grad_averaging}
        defaults |= {"max_grad_norm": max_grad_norm, "use_nvlamb": use_nvlamb, "maximize": maximize, "fused": fused}
        super().__init__(params, defaults, removed)


class NovoGrad(RuleOptimizer):
    """Momentum of gradients over an average of their norm, one a tensor; options and defaults of Apex FusedNovoGrad.

    From arXiv:1905.11286. State: ``step``, ``exp_avg``, and ``exp_avg_sq``, the average norm (0-dim). Of sharded
    parameters (DTensors) the norms are those of the whole tensors.

    Args:
        params: as in torch.
        lr: factor of the momentum.
        bias_correction: of both averages.
        betas: decay of the momentum and of the average norm.
        eps: added to the average norm.
        weight_decay: factor of the decay.
        reg_inside_moment: divide, and decay, before the momentum; else after it.
        grad_averaging: False adds the gradient to the momentum whole.
        norm_type: 2, or 0 or inf for the largest magnitude, which torch's operations compute.
        init_zero: start the average norm at 0; else at the first norm.
        maximize: move against the gradient's sign.
        fused: False keeps an `Engine` to torch's operations.
        removed: options of earlier versions, which are refused.

    Raises:
        SettingError: a number is out of range, or a parameter is not a real float.

    Example:
        >>> from easymp.optim import NovoGrad
        >>> parameter = nn.Parameter(torch.ones(1))
        >>> optimizer = NovoGrad([parameter], lr=0.1)
        >>> parameter.sum().backward()
        >>> optimizer.step()
        >>> parameter.data
        tensor([0.9968])
    """

    rule = rules.NOVOGRAD

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: float = 2,
        init_zero: bool = False,
        maximize: bool = False,
        fused: bool | None = None,
        **removed: Never,
    ) -> None:
        if norm_type not in (2, 0, math.inf):
            raise SettingError(f"norm_type={norm_type} must be 2, or inf (Apex writes 0)")
        defaults: dict[str, Any] = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        defaults |= {"weight_decay": weight_decay, "reg_inside_moment": reg_inside_moment}
        defaults |= {"grad_averaging": grad_averaging, "norm_type": norm_type, "init_zero": init_zero}
        defaults |= {"maximize": maximize, "fused": fused}
        super().__init__(params, defaults, removed)


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
            with without_decay(self.param_groups):
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
