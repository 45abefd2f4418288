"""Optimizers that torch does not have, each a rule of `rules.py` and a class: Lion, LAMB and NovoGrad.

LAMB and NovoGrad scale the length of a step tensor by tensor, by norms, as in Apex.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Never

import torch
from torch import Tensor

from ..cuda.rule import Rule
from ..errors import OPTIMIZER_REMEDY, SettingError
from .rules import LAMB as LAMB_RULE
from .rules import LION, NOVOGRAD, RULES, RuleStep
from .torch_step import OwnOptimizer


class RuleOptimizer(OwnOptimizer):
    """Base of optimizers that are a rule, which kernels or torch's operations run."""

    rule: ClassVar[Rule]

    def __init__(self, params: Any, defaults: dict[str, Any], removed: Mapping[str, Any]) -> None:
        for name in removed:
            if name in ("ema_decay", "state_dtype", "stochastic_rounding"):
                raise SettingError(f"{type(self).__name__}({name}=…) was removed. Instead: {OPTIMIZER_REMEDY}")
            raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {name!r}")
        for name in ("lr", "eps", "weight_decay", "max_grad_norm"):
            value = defaults.get(name)
            if value is not None and not value >= 0.0:
                raise SettingError(f"{name}={value} must be a number of at least 0")
        betas = defaults["betas"]
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise SettingError(f"betas={betas} must be two numbers from 0 to below 1; (0.9, 0.999) is usual")
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point():
                del self.param_groups[-1]
                raise SettingError(
                    f"{type(self).__name__} moves real floating-point parameters, not {parameter.dtype}: "
                    "give it to another optimizer"
                )

    def advance(self, factor: Tensor | None, found_inf: Tensor | None) -> None:
        RuleStep(self, self.rule)(factor, found_inf)


def step_rule(optimizer: torch.optim.Optimizer) -> Rule | None:
    """The rule that does what the step of `optimizer` does; None where there is none."""
    return optimizer.rule if isinstance(optimizer, OwnOptimizer) else RULES.get(type(optimizer))


def rule_of(optimizer: torch.optim.Optimizer) -> Rule | str:
    """The rule of one of torch's optimizers or ours; or the reason why kernels do not step it."""
    kind = type(optimizer)
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return "a differentiable step was asked for"
        if group.get("foreach") is not None or group.get("fused") is False:
            return "fused or foreach was chosen by the caller"
    if issubclass(kind, RuleOptimizer) and kind.advance is RuleOptimizer.advance:
        return kind.rule
    return RULES.get(kind) or f"there is no kernel for {kind.__name__}"


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

    rule = LION

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

    rule = LAMB_RULE

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

    rule = NOVOGRAD

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
