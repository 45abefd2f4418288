"""The moving average of the weights: ``Accelerator(ema_decay=0.999)``, used inside ``accelerator.averaged()``.

The optimizer's engine moves the averages as it steps, our kernels in the same pass. They are states of the optimizer,
so checkpoints keep them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..base.dtensor import local
from ..base.parts import Part
from ..cuda import EMA
from ..errors import StepError
from ..optim.sharded import ShardedOptimizer, holder_of


class AveragedWeights(Part):
    """Lets models compute with the averages of their weights."""

    name = "ema"

    def __init__(self) -> None:
        self._inside = False  # of `averaged`: parameters hold their averages

    @contextmanager
    def averaged(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Inside, `models` (none: all) hold their averages; afterwards their own weights, bit for bit. A collective."""
        self.run.world.settle()
        routes = self.run.prepared.routes(models) if models else ()
        chosen = {id(p) for route in routes for p in route.original.parameters()} if models else None
        # Written past the version counters of masters and autograd, since no step has changed the weights.
        weights: list[tuple[Tensor, Tensor]] = []
        for prepared in self.run.prepared.optimizers:
            optimizer, gathered = prepared.optimizer, list[Tensor]()
            for stepped, parameter in prepared.parameters():
                holder, states = holder_of(optimizer, stepped)
                average = states[holder].get(EMA) if holder in states else None
                if average is None or not (chosen is None or id(parameter) in chosen):
                    continue
                weight = local(parameter).data
                weights.append((weight, weight.clone()))
                if isinstance(optimizer, ShardedOptimizer):
                    optimizer.rows(weight).copy_(local(average))
                    gathered.append(weight)
                else:
                    weight.copy_(local(average))
            if isinstance(optimizer, ShardedOptimizer):
                optimizer.gather_rows(gathered)
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
            for weight, values in weights:
                weight.copy_(values)

    def step(self, optimizer: Any) -> None:
        if self._inside:
            raise StepError(
                "optimizer.step() inside `with accelerator.averaged():`, where the weights are not those of training: "
                "step after the block"
            )

    def saving(self, call: str, path: str | None) -> None:
        if self._inside and call == "save_state":
            raise StepError(
                "save_state() inside `with accelerator.averaged():` would keep averages as the weights of training: "
                "save after the block. The averages are in every checkpoint; save_model inside writes them as weights"
            )
