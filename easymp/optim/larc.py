"""LARC: "Large Batch Training of Convolutional Networks", You, Gitman and Ginsburg, arXiv:1708.03888, as Apex's wrapper has it.

Each tensor's gradient, weight decay in it, is multiplied by trust × |p| / (|g| + decay × |p| + eps), or by what of that is below 1 times
lr with `clip`; another rule does the rest, without decay. A tensor whose norm or whose gradient's is 0 has neither factor nor decay.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.dtensor import local
from ..cuda.rule import Group, Rule, Survey, code, direction, number
from ..errors import RefusedError
from .engine import rule_of
from .fused import FusedOptimizer, Options, StepChoice
from .torch_optimizers import swapped
from .torch_step import HOOKS, whole_squares, wide


class Trust(NamedTuple):
    """LARC's own numbers: the coefficient of the ratio of norms, whether factors stay at most 1, and an addend of the norms."""

    coefficient: float = 0.02
    clip: bool = True
    eps: float = 1e-8


def larc(rule: Rule, trust: Trust) -> Rule:
    """`rule`, without a survey of its own, on gradients scaled a tensor."""
    inside = {name: partial(_bare, how) for name, how in rule.numbers.items()}

    def element(states: tuple[str, ...]) -> str:
        body = code(rule.element, states)
        return f"const float sole = g; {{ const float g = (sole + pull * p) * adapt; {body} }}"

    return replace(
        rule,
        name=f"larc_{rule.name}",
        numbers={
            **inside,
            "larc_trust": lambda group: trust.coefficient,
            "larc_clip": lambda group: trust.clip,
            "larc_eps": lambda group: trust.eps,
            "larc_decay": lambda group: direction(group) * group["weight_decay"],
        },
        prepare=f"{rule.prepare}\nadapt = 1.0; pull = 0.0;",
        constants=(*rule.constants, "adapt", "pull"),
        element=element,
        reference=None,
        survey=Survey(
            sums=("weights", "gradients"),
            element="weights += p * p; gradients += g * g;",
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


def _bare(how: Any, group: Group) -> float:
    """A number of the rule inside, without the decay that LARC does."""
    return number(how, {**group, "weight_decay": 0.0})


def adapted(p: Tensor, g: Tensor, weight: Tensor, slope: Tensor, trust: Trust, group: Group) -> Tensor:
    """The gradient as the rule inside sees it, of a tensor with the norm `weight` and a gradient with the norm `slope`."""
    decay = group.get("weight_decay", 0.0)
    factor = trust.coefficient * weight / (slope + weight * decay + trust.eps)
    if trust.clip:
        factor = (factor / group["lr"]).clamp(max=1.0)
    moves = (weight > 0) & (slope > 0)
    pull = torch.where(moves, -decay if group.get("maximize") else decay, 0.0)
    return (g + pull * p) * torch.where(moves, factor, 1.0)


class LARC(FusedOptimizer):
    """Another optimizer, with a learning rate for each parameter that its norm and its gradient's allow.

    A gradient is multiplied, decay in it, by min(1, trust_coefficient × |p| / (|g| + weight_decay × |p| + eps) / lr). Param groups, state
    and checkpoints are those of the optimizer inside. Of sharded parameters (DTensors) the norms are those of the whole tensors.

    Args:
        optimizer: any of torch's classes; its weight decay is left to LARC.
        trust_coefficient: of the ratio of norms.
        clip: False leaves out the min and / lr, so that lr is multiplied by the ratio, whatever it is.
        eps: added to the norms.

    Raises:
        RefusedError: an optimizer that scales by norms of tensors itself.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        # torch's own __init__ would build param groups and state a second time.
        self.optim = optimizer
        self.trust = Trust(trust_coefficient, clip, eps)
        ours = isinstance(optimizer, FusedOptimizer)
        self.options = optimizer.options if ours else Options()
        inside = optimizer.rule if ours else rule_of(type(optimizer))
        if inside is not None and inside.survey is not None:
            raise RefusedError(
                f"{type(optimizer).__name__} scales by the norms of tensors already: LARC is for optimizers that do not"
            )
        self._inside = inside
        for name in HOOKS:
            setattr(self, name, OrderedDict())
        self._patch_step_function()

    @property
    def rule(self) -> Rule:  # type: ignore[override]
        assert self._inside is not None
        return larc(self._inside, self.trust)

    def _choose(self, wanted: bool) -> StepChoice:
        if self._inside is None:
            return self._by_torch(f"our kernels have no rule for {type(self.optim).__name__}")
        return super()._choose(wanted)

    @property
    def _stepped(self) -> torch.optim.Optimizer:
        return self.optim

    def _advance_averaged(self, moved: Any, factor: Tensor | None, found_inf: Tensor | None) -> None:
        self.advance_by_torch(moved, factor, found_inf)  # an average is kept by the optimizer inside

    def advance_by_torch(self, parameters: Any, factor: Tensor | None, found_inf: Tensor | None) -> None:
        held = [p.grad for p in parameters]
        gradients = [g.to_dense() if g.is_sparse else g for g in held]
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        weights = whole_squares(parameters, parameters).sqrt()
        slopes = whole_squares(parameters, gradients).sqrt()
        if factor is not None:
            gradients = list(torch._foreach_mul(gradients, factor))
            slopes = slopes * factor.to(slopes.device)
        hidden = [(p, p.grad) for p in self._parameters() if p.grad is not None]
        for parameter, _ in hidden:
            parameter.grad = None
        norms = zip(weights.float().unbind(), slopes.float().unbind())
        for p, g, (weight, slope) in zip(parameters, gradients, norms):
            here = weight.to(p.device), slope.to(p.device)
            new = adapted(wide(local(p)), wide(local(g)), *here, self.trust, groups[id(p)])
            p.grad = torch.empty_like(g)
            local(p.grad).copy_(new)
        try:
            with swapped(self.param_groups, "weight_decay", 0.0):
                self._step_inside(found_inf)
        finally:
            for parameter, gradient in hidden:
                parameter.grad = gradient

    def _step_inside(self, found_inf: Tensor | None) -> None:
        if isinstance(self.optim, FusedOptimizer):
            self.optim.advance(None, found_inf)
        elif found_inf is None or not found_inf.item():
            self.optim.step()

    # -- what the optimizer inside has ------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optim.defaults

    def state_dict(self) -> dict[str, Any]:
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def __repr__(self) -> str:
        return f"LARC({self.optim!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("optim", "trust", "options", "_inside", *HOOKS)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._patch_step_function()
