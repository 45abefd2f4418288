"""Averages of the weights in the place of the weights, for a while."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..base.dtensor import local
from ..cuda import EMA
from .optimizer import PreparedOptimizer
from .sharded import ShardedOptimizer, holder_of


@contextmanager
def averages_in(optimizers: Sequence[PreparedOptimizer], chosen: Container[int] | None) -> Iterator[None]:
    """Inside, parameters are their averages, where there are such; afterwards what they were, bit for bit. A collective under zero1.

    The weights of training are copied meanwhile. They are written past the counters by which a change is noticed (masters, autograd):
    nothing has been stepped.

    Args:
        chosen: ids of the parameters; None: all.
    """
    kept: list[tuple[Tensor, Tensor]] = []
    for optimizer in optimizers:
        there = optimizer.optimizer
        reunited: list[Tensor] = []
        for held, parameter in optimizer.parameters():
            average = average_of(there, held) if chosen is None or id(parameter) in chosen else None
            if average is None:
                continue
            whole = local(parameter).data
            kept.append((whole, whole.clone()))
            if isinstance(there, ShardedOptimizer):
                there.rows(whole).copy_(average)
                reunited.append(whole)
            else:
                whole.copy_(average)
        if isinstance(there, ShardedOptimizer):
            there.reunite(reunited)
        optimizer.away = True
    try:
        yield
    finally:
        for optimizer in optimizers:
            optimizer.away = False
        for whole, values in kept:
            whole.copy_(values)


def average_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor | None:
    """The average of `parameter`, or of this rank's part; None where no step has moved it yet."""
    holder, states = holder_of(optimizer, parameter)
    found = states[holder].get(EMA) if holder in states else None
    return None if found is None else local(found)
