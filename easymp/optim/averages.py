"""An exponential moving average of the weights, beside what the optimizer remembers of each parameter.

ema += (p - ema) × (1 - decay) at each step that moves p, from p's value before its first one ("Acceleration of Stochastic Approximation by
Averaging", Polyak and Juditsky, 1992; exponential as in Adam's arXiv:1412.6980, section 7.2). It lies under the key "ema" in the
optimizer's state, in fp32, split as the other states are, so checkpoints keep it as one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..base.dtensor import local
from ..cuda import EMA
from .masters import LOW

# A parameter → what is really stepped of it, and the mapping that its state is in.
Holder = Callable[[Tensor], tuple[Tensor, Any]]


class Averages:
    """The averages of one optimizer's parameters, where torch steps it.

    Args:
        holder: says of each parameter where its average goes.
        decay: None: there are none.
    """

    def __init__(self, holder: Holder, decay: float | None) -> None:
        self._holder, self.decay = holder, decay

    def around(
        self, parameters: Iterable[Tensor], step: Callable[[], Any], found_inf: Tensor | None = None
    ) -> Any:
        """`step()`, after which the averages of `parameters`, which it may move, follow them, unless `found_inf` is above 0."""
        if self.decay is None:
            return step()
        there = [(p, *self._holder(p)) for p in parameters]
        # The state of a parameter that has none is torch's to begin.
        new = {id(p): start(p) for _, p, states in there if EMA not in states.get(p, {})}
        result = step()
        # A closure may give some no gradient.
        held = [(p, states) for parameter, p, states in there if parameter.grad is not None]
        for p, states in held:
            if id(p) in new:
                states[p][EMA] = new[id(p)]
        if held:
            self._follow(
                [local(p) for p, _ in held], [local(states[p][EMA]) for p, states in held], found_inf
            )
        return result

    @torch.no_grad()
    def _follow(self, parameters: list[Tensor], averages: list[Tensor], found_inf: Tensor | None) -> None:
        assert self.decay is not None
        weights = [p.detach().to(a.dtype) for p, a in zip(parameters, averages)]
        share = 1.0 - self.decay
        if found_inf is None:
            torch._foreach_lerp_(averages, weights, share)
        else:
            shares = {a.device: ((found_inf <= 0) * share).to(a.device, non_blocking=True) for a in averages}
            torch._foreach_lerp_(averages, weights, [shares[a.device].to(a.dtype) for a in averages])


def start(parameter: Tensor) -> Tensor:
    """An average that begins."""
    now = parameter.detach()
    return now.to(torch.float32) if now.dtype in LOW else now.clone(memory_format=torch.preserve_format)


def without(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """Optimizer states, by whatever they go, without averages; the very same dicts where there were none."""
    kept = {}
    for key, state in states.items():
        has = isinstance(state, Mapping) and EMA in state
        kept[key] = {name: value for name, value in state.items() if name != EMA} if has else state
    return kept
