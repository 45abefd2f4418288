"""Lion: "Symbolic Discovery of Optimization Algorithms", Chen et al., arXiv:2302.06675, algorithm 2.

The sign of one average of gradients moves a weight, and another one is kept; decay is decoupled, times lr.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from ..cuda.rule import BETAS, Rule, direction
from .foreach import ListOptimizer, Lists
from .fused import OptionWords

LION = Rule(
    name="lion",
    states=("exp_avg",),
    numbers={**BETAS, "decay": "weight_decay", "direction": direction},
    prepare="""
sign = direction; shrink = 1.0 - lr * decay; size = lr;
keep1 = beta1; rest1 = 1.0 - beta1; keep2 = beta2; rest2 = 1.0 - beta2;
""",
    constants=("sign", "shrink", "size", "keep1", "rest1", "keep2", "rest2"),
    element="""
const float d = g * sign;
const float towards = keep1 * exp_avg + rest1 * d;
p = p * shrink - (towards > 0.f ? size : towards < 0.f ? -size : 0.f * towards);
exp_avg = keep2 * exp_avg + rest2 * d;
""",
    counts=False,
)


class Lion(ListOptimizer):
    """p -= lr × (sign(β1 m + (1 - β1) g) + weight_decay × p), then m = β2 m + (1 - β2) g (Chen et al., arXiv:2302.06675).

    The paper's advice: a third to a tenth of AdamW's lr, and as much more weight decay. State: ``exp_avg``.

    Args:
        params: as in torch.
        lr: length of a step of each weight.
        betas: β1 and β2.
        weight_decay: factor of the decoupled decay.
        options: maximize, fused, ema_decay, state_dtype and stochastic_rounding, see `ListOptimizer`.

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
        **options: Unpack[OptionWords],
    ) -> None:
        group = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, group, **options)

    def advance_lists(self, lists: Sequence[tuple[dict[str, Any], Lists]]) -> None:
        for group, of in lists:
            (beta1, beta2), size, m = group["betas"], group["lr"] * of.go, of.states["exp_avg"]
            towards = torch._foreach_mul(m, beta1)
            torch._foreach_add_(towards, of.g, alpha=1 - beta1)
            torch._foreach_sign_(towards)
            torch._foreach_mul_(towards, size)
            torch._foreach_mul_(of.p, 1 - size * group["weight_decay"])
            torch._foreach_sub_(of.p, towards)
            torch._foreach_mul_(m, 1 - (1 - beta2) * of.go)
            torch._foreach_add_(m, of.g, alpha=1 - beta2)
