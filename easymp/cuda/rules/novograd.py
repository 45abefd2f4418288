"""NovoGrad: "Stochastic Gradient Methods with Layer-wise Adaptive Moments …", Ginsburg et al., arXiv:1905.11286, as Apex's FusedNovoGrad.

The second moment is one number a tensor. As in Apex, ``exp_avg_sq`` holds its root, an average norm; here it is kept of each parameter,
there of a param group. The first norm starts it, unless `init_zero`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..rule import Group, Rule, Survey


def _refuse(group: Group) -> str | None:
    if group["norm_type"] != 2:
        return f"norm_type={group['norm_type']}, and the kernels add up squares only"
    return None


def _hyper(group: Group) -> tuple[float, ...]:
    beta1, beta2 = (float(b) for b in group["betas"])
    return (
        beta1,
        beta2,
        float(group["eps"]),
        float(group["weight_decay"]),
        1.0 - beta1 if group["grad_averaging"] else 1.0,
        float(bool(group["bias_correction"])),
        float(bool(group["init_zero"])),
        float(bool(group["reg_inside_moment"])),
        -1.0 if group["maximize"] else 1.0,
    )


def blended(norm: Tensor, before: Tensor, group: Group, step: int | Tensor) -> Tensor:
    """The average of norms after a step on a gradient of this norm."""
    beta2 = group["betas"][1]
    if not group["init_zero"]:
        before = torch.where(torch.as_tensor(step == 1, device=norm.device), norm, before)
    if group["norm_type"] == 2:
        return (beta2 * before.square() + (1 - beta2) * norm.square()).sqrt()
    return beta2 * before + (1 - beta2) * norm


def reference(p: Tensor, g: Tensor, states: dict[str, Any], group: Group, step: int) -> None:
    beta1, beta2 = group["betas"]
    d = -g if group["maximize"] else g
    norm = d.norm() if group["norm_type"] == 2 else d.abs().max()
    states["exp_avg_sq"].copy_(blended(norm, states["exp_avg_sq"], group, step))
    corrections = (1 - beta1**step, math.sqrt(1 - beta2**step)) if group["bias_correction"] else (1.0, 1.0)
    below = states["exp_avg_sq"] / corrections[1] + group["eps"]
    if group["reg_inside_moment"]:
        d = d / below + group["weight_decay"] * p
    states["exp_avg"].mul_(beta1).add_(d, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
    update = states["exp_avg"] / corrections[0]
    if not group["reg_inside_moment"]:
        update = update / below + group["weight_decay"] * p
    p.sub_(group["lr"] * update)


NOVOGRAD = Rule(
    name="novograd",
    states=("exp_avg",),
    uses=lambda group: ("exp_avg",),
    refuse=_refuse,
    hyper=_hyper,
    numbers=("beta1", "beta2", "epsilon", "decay", "average", "correct", "from_zero", "inside", "direction"),
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
        element=lambda states: "squares += g * g;",
        weigh="""
const double held = first != 0.0 && from_zero == 0.0 ? squares : exp_avg_sq * exp_avg_sq;
exp_avg_sq = sqrt(beta2 * held + (1.0 - beta2) * squares);
const double share = 1.0 / (exp_avg_sq * root + epsilon);
before = inside != 0.0 ? share : 1.0; after = inside != 0.0 ? 1.0 : share;
""",
    ),
    element=lambda states: (
        """
const float d = g * sign * before + l2 * p;
exp_avg = keep1 * exp_avg + rest1 * d;
p -= size * after * exp_avg + fade * p;
"""
    ),
    reference=reference,
    scalar="exp_avg_sq",
)
