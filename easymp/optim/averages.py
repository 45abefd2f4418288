"""An exponential moving average of the weights, beside what the optimizer remembers of each parameter.

ema += (p - ema) × (1 - decay) at each step that moves p, from p's value before its first one ("Acceleration of Stochastic Approximation by
Averaging", Polyak and Juditsky, 1992; exponential as in Adam's arXiv:1412.6980, section 7.2). It lies under the key "ema" in the
optimizer's state, in fp32, split as the other states are, so checkpoints keep it as one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..cuda.step import EMA
from ..shards import local
from .masters import LOW
from .sharded import ShardedOptimizer


class Averages:
    """The averages of one optimizer's parameters, where torch steps it.

    Args:
        decay: None: there are none.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float | None) -> None:
        self.optimizer, self.decay = optimizer, decay

    @torch.no_grad()
    def around(self, parameters: Iterable[Tensor], step: Callable[[], Any], found_inf: Tensor | None = None) -> Any:
        """`step()`, after which the averages of `parameters`, which it may move, follow them, unless `found_inf` is above 0."""
        if self.decay is None:
            return step()
        there = [(p, *holder_of(self.optimizer, p)) for p in parameters]
        # The state of a parameter that has none is torch's to begin.
        new = {id(p): start(p) for _, p, states in there if EMA not in states.get(p, {})}
        with torch.enable_grad():
            result = step()
        held = [
            (p, states) for parameter, p, states in there if parameter.grad is not None
        ]  # a closure may give no gradient to some
        if not held:
            return result
        for p, states in held:
            if id(p) in new:
                states[p][EMA] = new[id(p)]
        averages = [local(states[p][EMA]) for p, states in held]
        weights = [local(p).to(torch.float32) if p.dtype in LOW else local(p).detach() for p, _ in held]
        share = 1.0 - self.decay
        if found_inf is None:
            torch._foreach_lerp_(averages, weights, share)
        else:
            shares = {a.device: ((found_inf <= 0) * share).to(a.device, non_blocking=True) for a in averages}
            torch._foreach_lerp_(averages, weights, [shares[a.device].to(a.dtype) for a in averages])
        return result


def start(parameter: Tensor) -> Tensor:
    """An average that begins."""
    now = parameter.detach()
    return now.to(torch.float32) if now.dtype in LOW else now.clone(memory_format=torch.preserve_format)


def holder_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> tuple[Tensor, Any]:
    """What `optimizer` really steps of `parameter`, this rank's rows where states are split, and where its state is."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.mine(parameter)
    return parameter, optimizer.state


def average_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor | None:
    """The average of `parameter`, or of this rank's part; None where no step has moved it yet."""
    holder, states = holder_of(optimizer, parameter)
    found = states[holder].get(EMA) if holder in states else None
    return None if found is None else local(found)
