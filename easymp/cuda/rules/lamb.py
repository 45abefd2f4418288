"""LAMB: "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", You et al., arXiv:1904.00962, as in Apex.

Apex's choices: the gradients are clipped to a norm over all of them first; a tensor without weight decay has the ratio 1, unless
`use_nvlamb`; so has one whose norm, or whose update's norm, is 0. Without `adam_w_mode` the decay is a part of the gradient (L2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..rule import Group, Rule, Survey


def _hyper(group: Group) -> tuple[float, ...]:
    decay, decoupled = float(group["weight_decay"]), bool(group["adam_w_mode"])
    beta1, beta2 = (float(b) for b in group["betas"])
    return (
        beta1,
        beta2,
        float(group["eps"]),
        0.0 if decoupled else decay,
        decay if decoupled else 0.0,
        1.0 - beta1 if group["grad_averaging"] else 1.0,
        float(bool(group["bias_correction"])),
        float(group["max_grad_norm"] or 0.0),
        float(bool(group["use_nvlamb"] or decay)),
        -1.0 if group["maximize"] else 1.0,
    )


_UPDATE = "(exp_avg * unbias / (sqrtf(exp_avg_sq) * root + eps) + plain * p)"


def reference(p: Tensor, g: Tensor, states: dict[str, Any], group: Group, step: int) -> None:
    """`g` is clipped already: one tensor knows no norm of all."""
    beta1, beta2 = group["betas"]
    d = -g if group["maximize"] else g
    if not group["adam_w_mode"]:
        d = d + group["weight_decay"] * p
    states["exp_avg"].mul_(beta1).add_(d, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
    states["exp_avg_sq"].mul_(beta2).addcmul_(d, d, value=1 - beta2)
    corrections = (1 - beta1**step, 1 - beta2**step) if group["bias_correction"] else (1.0, 1.0)
    update = (
        states["exp_avg"] / corrections[0] / ((states["exp_avg_sq"] / corrections[1]).sqrt() + group["eps"])
    )
    if group["adam_w_mode"]:
        update = update + group["weight_decay"] * p
    rate: Any = group["lr"]
    if group["use_nvlamb"] or group["weight_decay"]:
        weight, moved = p.norm(), update.norm()
        rate = rate * torch.where((weight > 0) & (moved > 0), weight / moved, 1.0)
    p.sub_(rate * update)


LAMB = Rule(
    name="lamb",
    states=("exp_avg", "exp_avg_sq"),
    uses=lambda group: ("exp_avg", "exp_avg_sq"),
    refuse=lambda group: None,
    hyper=_hyper,
    numbers=(
        *(
            "beta1",
            "beta2",
            "epsilon",
            "decay",
            "decoupled",
            "average",
            "correct",
            "most",
            "trusted",
            "direction",
        ),
    ),
    prepare="""
sign = direction * (most > 0.0 && norm > most ? most / norm : 1.0);
l2 = decay; plain = decoupled; eps = epsilon; size = lr;
keep1 = beta1; rest1 = average; keep2 = beta2; rest2 = 1.0 - beta2;
unbias = correct != 0.0 ? 1.0 / (1.0 - pow(beta1, step)) : 1.0;
root = correct != 0.0 ? 1.0 / sqrt(1.0 - pow(beta2, step)) : 1.0;
""",
    constants=("sign", "l2", "plain", "eps", "size", "keep1", "rest1", "keep2", "rest2", "unbias", "root"),
    survey=Survey(
        sums=("weights", "updates"),
        element=lambda states: (
            f"""
const float d = g * sign + l2 * p;
exp_avg = keep1 * exp_avg + rest1 * d;
exp_avg_sq = keep2 * exp_avg_sq + rest2 * d * d;
const float u = {_UPDATE};
weights += p * p;
updates += u * u;
"""
        ),
        weigh="if (trusted != 0.0 && weights > 0.0 && updates > 0.0) size = lr * sqrt(weights / updates);",
        moves=True,
    ),
    element=lambda states: f"p -= size * {_UPDATE};",
    reference=reference,
    norm=True,
)
