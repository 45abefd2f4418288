"""NovoGrad: "Stochastic Gradient Methods with Layer-wise Adaptive Moments …", Ginsburg et al., arXiv:1905.11286, as Apex's FusedNovoGrad.

The second moment is one number a tensor. As in Apex, ``exp_avg_sq`` holds its root, an average norm; here it is kept of each parameter,
there of a param group. The first norm starts it, unless `init_zero`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from ..base.dtensor import local
from ..cuda.rule import BETAS, Group, Rule, Survey, direction
from ..errors import SettingError, StepError
from .foreach import ListOptimizer, Lists
from .fused import OptionWords
from .torch_step import whole_squares


def _refuse(group: Group) -> str | None:
    if group["norm_type"] == 2:
        return None
    return f"norm_type={group['norm_type']}, and the kernels add up squares only"


def _blended(norm: Tensor, before: Tensor, group: Group, step: Tensor) -> Tensor:
    """The average of norms after a step on a gradient of this norm."""
    beta2 = group["betas"][1]
    if not group["init_zero"]:
        before = torch.where(step == 1, norm, before)
    if group["norm_type"] == 2:
        return (beta2 * before.square() + (1 - beta2) * norm.square()).sqrt()
    return beta2 * before + (1 - beta2) * norm


NOVOGRAD = Rule(
    name="novograd",
    states=("exp_avg",),
    refuse=_refuse,
    numbers={
        **BETAS,
        "epsilon": "eps",
        "decay": "weight_decay",
        "average": lambda group: 1.0 - group["betas"][0] if group["grad_averaging"] else 1.0,
        "correct": "bias_correction",
        "from_zero": "init_zero",
        "inside": "reg_inside_moment",
        "direction": direction,
    },
    prepare="""
first = step == 1.0 ? 1.0 : 0.0; sign = direction; keep1 = beta1; rest1 = average;
size = correct != 0.0 ? lr / (1.0 - pow(beta1, step)) : lr;
root = correct != 0.0 ? 1.0 / sqrt(1.0 - pow(beta2, step)) : 1.0;
l2 = inside != 0.0 ? decay : 0.0; fade = inside != 0.0 ? 0.0 : lr * decay;
""",
    constants=("first", "sign", "keep1", "rest1", "size", "root", "l2", "fade", "before", "after"),
    survey=Survey(
        sums=("squares",),
        reads=("g",),
        element="squares += g * g;",
        weigh="""
const double held = first != 0.0 && from_zero == 0.0 ? squares : exp_avg_sq * exp_avg_sq;
exp_avg_sq = sqrt(beta2 * held + (1.0 - beta2) * squares);
const double share = 1.0 / (exp_avg_sq * root + epsilon);
before = inside != 0.0 ? share : 1.0; after = inside != 0.0 ? 1.0 : share;
""",
    ),
    element="""
const float d = g * sign * before + l2 * p;
exp_avg = keep1 * exp_avg + rest1 * d;
p -= size * after * exp_avg + fade * p;
""",
    scalar="exp_avg_sq",
)


class NovoGrad(ListOptimizer):
    """Momentum of gradients divided by an average of their norm, one a tensor, with Apex FusedNovoGrad's options and defaults.

    Ginsburg et al., arXiv:1905.11286. State: ``step``, ``exp_avg``, and ``exp_avg_sq``, the average norm (0-dim). Of sharded parameters
    (DTensors) the norms are those of the whole tensors.

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
        options: maximize, fused, ema_decay, state_dtype and stochastic_rounding, see `ListOptimizer`.

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
        **options: Unpack[OptionWords],
    ) -> None:
        if norm_type not in (2, 0, math.inf):
            raise SettingError(f"norm_type={norm_type} must be 2, or inf (Apex writes 0)")
        group = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        group |= {"weight_decay": weight_decay, "reg_inside_moment": reg_inside_moment}
        group |= {"grad_averaging": grad_averaging, "norm_type": norm_type, "init_zero": init_zero}
        super().__init__(params, group, **options)

    def advance_lists(self, lists: Sequence[tuple[dict[str, Any], Lists]]) -> None:
        for group, of in lists:
            (beta1, beta2), p, m = group["betas"], of.p, of.states["exp_avg"]
            steps, g = of.steps, of.g
            below = self._norms(group, of, steps)
            correction = 1.0
            if group["bias_correction"]:
                correction = 1 - beta1**steps
                below = below / (1 - beta2**steps).sqrt()
            shares = list((1 / (below + group["eps"])).float().unbind())
            decay = group["weight_decay"]
            if group["reg_inside_moment"]:
                g = torch._foreach_mul(g, shares)
                torch._foreach_add_(g, torch._foreach_mul(p, decay * of.go))
            torch._foreach_mul_(m, 1 - (1 - beta1) * of.go)
            torch._foreach_add_(m, g, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
            size = group["lr"] * of.go
            rates = torch.as_tensor(size / correction, device=p[0].device).expand(len(p)).float().unbind()
            update = torch._foreach_mul(m, list(rates))
            if not group["reg_inside_moment"]:
                torch._foreach_mul_(update, shares)
                torch._foreach_mul_(p, 1 - size * decay)
            torch._foreach_sub_(p, update)

    def _norms(self, group: dict[str, Any], of: Lists, steps: Tensor) -> Tensor:
        """The average norms after this step, [parameters], which the states have then."""
        held = [self.state[p]["exp_avg_sq"] for p in of.parameters]
        before = torch.stack(held).to(steps.dtype)
        if group["norm_type"] == 2:
            now = whole_squares(of.parameters, of.g).sqrt()
        elif any(local(p) is not p for p in of.parameters):
            raise StepError(
                "the largest magnitude of a sharded gradient is not computed: use norm_type=2, or strategy='ddp'"
            )
        else:
            most = [g.abs().amax() if g.numel() else g.new_zeros(()) for g in of.g]
            now = torch.stack(most).to(steps.dtype)
        after = _blended(now, before, group, steps)
        kept = torch.where(torch.as_tensor(of.go, device=after.device) > 0, after, torch.stack(held))
        torch._foreach_copy_(held, list(kept.unbind()))
        return after
