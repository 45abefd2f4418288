"""Adagrad, as torch has it.

"Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", Duchi, Hazan and Singer, JMLR 12, 2011.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..rule import Group, Rule


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
    refuse=lambda group: None,
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
