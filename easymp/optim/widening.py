"""A step by torch where states have another dtype than their parameter, or bf16 is rounded stochastically, which no step of torch does.

Each tensor is widened to fp32, moved by its rule's reference, and rounded as the kernels round it, one after the other: for machines
without them, to give their numbers rather than their speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import cuda
from ..base.dtensor import local
from .torch_step import wide

if TYPE_CHECKING:
    from ..cuda.rounding import Rounding
    from ..cuda.rule import Group, Rule


def fill(
    rule: Rule, group: Group, parameter: Tensor, state: dict[str, Any], dtype: torch.dtype | None
) -> tuple[dict[str, Any], bool]:
    """`state` with all that `rule` has there, in `dtype`; and whether some of it was missing."""
    fresh = False
    for key in rule.uses(group):
        value = state.get(key)
        fresh |= value is None
        if value is None:
            state[key] = torch.full_like(parameter, rule.starts(group), dtype=dtype, requires_grad=False)
        elif dtype is not None and value.dtype != dtype:
            state[key] = value.to(dtype)
    for key in ("step",) * rule.counts + (rule.scalar,) * bool(rule.scalar):
        value = state.get(key, 0.0)
        if not isinstance(value, Tensor) or value.device != parameter.device or value.dtype != torch.float32:
            state[key] = torch.as_tensor(value).to(parameter.device, torch.float32)
    return state, fresh


class Widened:
    """Steps of one optimizer.

    Args:
        rule: without a survey.
        dtype: of states; None: their parameter's.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rule: Rule,
        dtype: torch.dtype | None,
        rounding: Rounding | None,
    ) -> None:
        self._optimizer, self._rule, self._dtype, self._rounding = optimizer, rule, dtype, rounding
        self._steps: dict[Tensor, Tensor] = {}  # where the state has none

    def step(self, parameters: Iterable[Tensor], factor: Tensor | None, found_inf: Tensor | None) -> None:
        """Waits for the flag, where there is one."""
        if found_inf is not None and found_inf.item():
            return
        mine = {id(p) for p in parameters}
        number = 0
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in mine:
                    self._move(parameter, group, number, factor)
                number += 1

    def _move(self, parameter: Any, group: Group, number: int, factor: Tensor | None) -> None:
        state, fresh = fill(self._rule, group, parameter, self._optimizer.state[parameter], self._dtype)
        if not self._rule.counts and (fresh or parameter not in self._steps):
            self._steps[parameter] = torch.tensor(0.0 if fresh else 1.0)
        counter = state["step"] if self._rule.counts else self._steps[parameter]
        counter += 1
        keys = self._rule.uses(group)
        held = [local(parameter), *(local(state[key]) for key in keys)]
        moved = [wide(t) for t in held]
        gradient = wide(local(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad))
        if factor is not None:
            gradient = gradient * factor.to(gradient.device)
        self._rule.reference(moved[0], gradient, dict(zip(keys, moved[1:])), group, int(counter.item()))
        round_back([held], [moved], [counter], [number], self._rounding, [parameter])


def round_back(
    held: Sequence[Sequence[Tensor]],
    moved: Sequence[Sequence[Tensor]],
    counters: Sequence[Tensor],
    numbers: Sequence[int],
    rounding: Rounding | None,
    parameters: Sequence[Any],
) -> None:
    """Write what was widened back: for each of `parameters`, itself and its states, in their order.

    Args:
        counters: steps, this one counted.
        numbers: of the parameters in their optimizer.
    """
    nearest: tuple[list[Tensor], list[Tensor]] = ([], [])
    for mine, wides, counter, number, parameter in zip(held, moved, counters, numbers, parameters):
        for role, (to, value) in enumerate(zip(mine, wides)):
            if rounding is not None and to.dtype == torch.bfloat16:
                key = cuda.key_of(rounding.seed, counter, number, to.device)
                to.copy_(cuda.stochastic(value, key, role, rounding.first(parameter)))
            elif to.dtype != value.dtype:
                nearest[0].append(to)
                nearest[1].append(value)
    if nearest[0]:
        torch._foreach_copy_(*nearest)
