"""Our optimizers that torch does not have: where kernels do not run, by operations on lists of tensors (foreach), without a wait.

A step that is to be skipped is one by nothing: gradients become 0, and `go` (0 or 1, on the device) is a factor where that is not enough.
Half precision is widened to fp32 for the step and rounded after it, as the kernels do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base.dtensor import local
from ..errors import SettingError
from .fusing import FusedOptimizer
from .torch_step import wide
from .widening import fill, round_back


@dataclass(frozen=True, eq=False)
class Lists:
    """Parameters of one group, on one device.

    Attributes:
        parameters: as the group holds them.
        p, g: what of them lies here, and their gradients; in fp32 or wider.
        states: likewise, by their keys.
        steps: number of this step, from 1, [parameters]; float64 where the device has it. None where the state has none.
        go: 1, or 0 if nothing is to change.
    """

    parameters: list[Tensor]
    p: list[Tensor]
    g: list[Tensor]
    states: dict[str, list[Tensor]]
    steps: Tensor | None
    go: Any


class ListedOptimizer(FusedOptimizer):
    """Base of optimizers that move lists of tensors."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point():
                kind = type(self).__name__
                del self.param_groups[-1]
                raise SettingError(
                    f"{kind} moves real floating-point parameters, not {parameter.dtype}: give it to another optimizer"
                )

    def advance_by_torch(
        self, parameters: Sequence[Tensor], factor: Tensor | None, found_inf: Tensor | None
    ) -> None:
        if self.options.rounding is not None and not self.rule.counts:
            return self.widened.step(parameters, factor, found_inf)
        mine = {id(p) for p in parameters}
        lists: list[tuple[dict[str, Any], Lists]] = []
        for group in self.param_groups:
            by_device: dict[torch.device, list[Tensor]] = {}
            for parameter in group["params"]:
                if id(parameter) in mine:
                    by_device.setdefault(parameter.device, []).append(parameter)
            lists += [(group, self._listed(group, of, factor, found_inf)) for of in by_device.values()]
        self.advance_lists(lists)
        order = {id(p): number for number, p in enumerate(self._parameters())}
        for group, of in lists:
            keys = self.rule.uses(group)
            held = [[local(p), *(local(self.state[p][key]) for key in keys)] for p in of.parameters]
            moved = [list(row) for row in zip(of.p, *(of.states[key] for key in keys))]
            numbers = [order[id(p)] for p in of.parameters]
            counters = [self.state[p].get("step", of.p[0]) for p in of.parameters]
            round_back(held, moved, counters, numbers, self.rounding, of.parameters)

    def _listed(
        self, group: dict[str, Any], parameters: list[Tensor], factor: Tensor | None, found_inf: Tensor | None
    ) -> Lists:
        device = parameters[0].device
        grads: list[Any] = [p.grad for p in parameters]
        grads = [wide(local(g.to_dense() if g.is_sparse else g)) for g in grads]
        if factor is not None:
            grads = torch._foreach_mul(grads, factor.to(device))
        go: Any = 1.0
        if found_inf is not None:
            bad = found_inf.to(device) > 0
            go = 1.0 - bad.float()
            grads = [g.masked_fill(bad, 0.0) for g in grads]
        uses = self.rule.uses(group)
        for parameter in parameters:
            fill(self.rule, group, parameter, self.state[parameter], self.options.state_dtype)
        steps = None
        if self.rule.counts:
            torch._foreach_add_([self.state[p]["step"] for p in parameters], go)
            steps = torch.stack([self.state[p]["step"] for p in parameters]).clamp(min=1.0)
            steps = steps if device.type == "mps" else steps.double()
        states = {key: [wide(local(self.state[p][key])) for p in parameters] for key in uses}
        return Lists(parameters, [wide(local(p)) for p in parameters], grads, states, steps, go)

    def advance_lists(self, lists: Sequence[tuple[dict[str, Any], Lists]]) -> None:
        """Move them, in place, and what states of one number a tensor there are."""
        raise NotImplementedError


def signed(group: dict[str, Any], lists: Lists) -> list[Tensor]:
    """The gradients to go down along."""
    return list(torch._foreach_neg(lists.g)) if group["maximize"] else lists.g


def check(**numbers: Any) -> None:
    """Raises SettingError where an optimizer's number is below 0, or one of its betas is not below 1."""
    for name, value in numbers.items():
        if name == "betas":
            if len(value) != 2 or not all(0.0 <= b < 1.0 for b in value):
                raise SettingError(
                    f"betas={value} must be two numbers, at least 0 and below 1; (0.9, 0.999) is usual"
                )
        elif not value >= 0.0:
            raise SettingError(f"{name}={value} must be a number of at least 0")
