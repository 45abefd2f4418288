"""Lion: "Symbolic Discovery of Optimization Algorithms", Chen et al., arXiv:2302.06675, algorithm 2.

The sign of one average of gradients moves a weight, and another one is kept; decay is decoupled, times lr.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..rule import Group, Rule


def _hyper(group: Group) -> tuple[float, ...]:
    return (
        *(float(b) for b in group["betas"]),
        float(group["weight_decay"]),
        -1.0 if group["maximize"] else 1.0,
    )


def reference(p: Tensor, g: Tensor, states: dict[str, Any], group: Group, step: int) -> None:
    beta1, beta2 = group["betas"]
    d = -g if group["maximize"] else g
    towards = beta1 * states["exp_avg"] + (1 - beta1) * d
    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * towards.sign())
    states["exp_avg"].mul_(beta2).add_((1 - beta2) * d)


LION = Rule(
    name="lion",
    states=("exp_avg",),
    uses=lambda group: ("exp_avg",),
    refuse=lambda group: None,
    hyper=_hyper,
    numbers=("beta1", "beta2", "decay", "direction"),
    prepare="""
sign = direction; shrink = 1.0 - lr * decay; size = lr;
keep1 = beta1; rest1 = 1.0 - beta1; keep2 = beta2; rest2 = 1.0 - beta2;
""",
    constants=("sign", "shrink", "size", "keep1", "rest1", "keep2", "rest2"),
    element=lambda states: (
        """
const float d = g * sign;
const float towards = keep1 * exp_avg + rest1 * d;
p = p * shrink - (towards > 0.f ? size : towards < 0.f ? -size : 0.f * towards);
exp_avg = keep2 * exp_avg + rest2 * d;
"""
    ),
    reference=reference,
    counts=False,
)
