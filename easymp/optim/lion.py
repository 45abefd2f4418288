"""Lion: "Symbolic Discovery of Optimization Algorithms", Chen et al., arXiv:2302.06675, algorithm 2.

The sign of one average of gradients moves a weight, and another one is kept; decay is decoupled, times lr.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..cuda.rule import Group, Rule
from .foreach import ListOptimizer, Lists, signed
from .fused import Options


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


class Lion(ListOptimizer):
    """p -= lr × (sign(β1 m + (1 - β1) g) + weight_decay × p), then m = β2 m + (1 - β2) g.

    The paper's advice: a tenth to a third of AdamW's lr, and as much more weight decay. State: ``exp_avg``.

    Args:
        maximize: go up.
        fused: False keeps to torch's operations.
        ema_decay, state_dtype, stochastic_rounding: see `Options`.
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
        ema_decay: float | None = None,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: int | bool = False,
    ) -> None:
        options = Options(ema_decay, state_dtype, stochastic_rounding)
        group = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, options, **group, maximize=maximize, fused=fused)

    def advance_lists(self, lists: Sequence[tuple[dict[str, Any], Lists]]) -> None:
        for group, of in lists:
            (beta1, beta2), size, m = group["betas"], group["lr"] * of.go, of.states["exp_avg"]
            g = signed(group, of)
            towards = torch._foreach_mul(m, beta1)
            torch._foreach_add_(towards, g, alpha=1 - beta1)
            torch._foreach_sign_(towards)
            torch._foreach_mul_(towards, size)
            torch._foreach_mul_(of.p, 1 - size * group["weight_decay"])
            torch._foreach_sub_(of.p, towards)
            torch._foreach_mul_(m, 1 - (1 - beta2) * of.go)
            torch._foreach_add_(m, g, alpha=1 - beta2)
