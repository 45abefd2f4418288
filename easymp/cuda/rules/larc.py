"""LARC: "Large Batch Training of Convolutional Networks", You, Gitman and Ginsburg, arXiv:1708.03888, as Apex's wrapper has it.

Each tensor's gradient, weight decay in it, is multiplied by trust × |p| / (|g| + decay × |p| + eps), or by what of that is below 1 times
lr with `clip`; another rule does the rest, without decay. A tensor whose norm or whose gradient's is 0 has neither factor nor decay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...errors import SettingError
from ..rule import Group, Rule, Survey


@dataclass(frozen=True)
class Trust:
    """LARC's own numbers.

    Attributes:
        coefficient: of the ratio of norms.
        clip: let no factor raise lr.
        eps: beside the norms.
    """

    coefficient: float = 0.02
    clip: bool = True
    eps: float = 1e-8


def larc(rule: Rule, trust: Trust) -> Rule:
    """`rule`, on gradients scaled a tensor.

    Raises:
        SettingError: a rule that has a survey of its own.
    """
    if rule.survey is not None:
        raise SettingError(
            f"LARC scales gradients by the norms of tensors, and so does {rule.name}: take one of them"
        )

    def hyper(group: Group) -> tuple[float, ...]:
        decay = float(group.get("weight_decay", 0.0))
        decay = -decay if group.get("maximize") else decay
        return (*rule.hyper(bare(group)), trust.coefficient, float(trust.clip), trust.eps, decay)

    def element(states: tuple[str, ...]) -> str:
        return (
            f"const float sole = g; {{ const float g = (sole + pull * p) * adapt; {rule.element(states)} }}"
        )

    def reference(p: Tensor, g: Tensor, states: dict[str, Any], group: Group, step: int) -> None:
        rule.reference(p, adapted(p, g, p.norm(), g.norm(), trust, group), states, bare(group), step)

    return replace(
        rule,
        name=f"larc_{rule.name}",
        hyper=hyper,
        numbers=(*rule.numbers, "larc_trust", "larc_clip", "larc_eps", "larc_decay"),
        prepare=f"{rule.prepare}\nadapt = 1.0; pull = 0.0;",
        constants=(*rule.constants, "adapt", "pull"),
        element=element,
        reference=reference,
        survey=Survey(
            sums=("weights", "gradients"),
            element=lambda states: "weights += p * p; gradients += g * g;",
            weigh="""
if (weights > 0.0 && gradients > 0.0) {
  const double weight = sqrt(weights);
  adapt = larc_trust * weight / (sqrt(gradients) + weight * fabs(larc_decay) + larc_eps);
  if (larc_clip != 0.0) adapt = adapt < lr ? adapt / lr : 1.0;
  pull = larc_decay;
}
""",
        ),
    )


def bare(group: Group) -> dict[str, Any]:
    """The group as the rule inside sees it: decay is LARC's."""
    return {**group, "weight_decay": 0.0}


def adapted(p: Tensor, g: Tensor, weight: Tensor, slope: Tensor, trust: Trust, group: Group) -> Tensor:
    """The gradient as the rule inside sees it, of a tensor with the norm `weight` and a gradient with the norm `slope`."""
    decay = group.get("weight_decay", 0.0)
    factor = trust.coefficient * weight / (slope + weight * decay + trust.eps)
    if trust.clip:
        factor = (factor / group["lr"]).clamp(max=1.0)
    moves = (weight > 0) & (slope > 0)
    pull = torch.where(moves, -decay if group.get("maximize") else decay, 0.0)
    return (g + pull * p) * torch.where(moves, factor, 1.0)
