"""Adagrad, as torch has it.

"Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", Duchi, Hazan and Singer, JMLR 12, 2011.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..cuda.rule import Group, Rule
from .fused import Options, TorchOptimizer


def _hyper(group: Group) -> tuple[float, ...]:
    return (
        float(group["lr_decay"]),
        float(group["eps"]),
        float(group["weight_decay"]),
        -1.0 if group["maximize"] else 1.0,
    )


def reference(p: Tensor, g: Tensor, states: dict[str, Any], group: Group, step: int) -> None:
    d = (-g if group["maximize"] else g) + group["weight_decay"] * p
    states["sum"].addcmul_(d, d)
    p.sub_(group["lr"] / (1 + (step - 1) * group["lr_decay"]) * d / (states["sum"].sqrt() + group["eps"]))


ADAGRAD = Rule(
    name="adagrad",
    states=("sum",),
    uses=lambda group: ("sum",),
    hyper=_hyper,
    numbers=("lr_decay", "epsilon", "decay", "direction"),
    prepare="sign = direction; l2 = decay; eps = epsilon; size = lr / (1.0 + (step - 1.0) * lr_decay);",
    constants=("sign", "l2", "eps", "size"),
    element=lambda states: (
        """
const float d = g * sign + l2 * p;
sum += d * d;
p -= size * (d / (sqrtf(sum) + eps));
"""
    ),
    reference=reference,
    starts=lambda group: float(group["initial_accumulator_value"]),
)


class Adagrad(TorchOptimizer, torch.optim.Adagrad):
    """torch.optim.Adagrad.

    Args:
        ema_decay, state_dtype, stochastic_rounding: see `Options`. The other arguments are torch's.
    """

    rule = ADAGRAD
    torchs = torch.optim.Adagrad

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        fused: bool | None = None,
        ema_decay: float | None = None,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: int | bool = False,
    ) -> None:
        self.options = Options(ema_decay, state_dtype, stochastic_rounding)
        super().__init__(
            params, lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize=maximize, fused=fused
        )
