"""fp8 weights are rounded once an update, in front of the first forward that trains, and forgotten after the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from ..base.parts import Part
from ..precision.policies import Float8Linear, forget_rounded, round_once

if TYPE_CHECKING:
    from ..training.wrapper import Route


class RoundedWeights(Part):
    """Keeps the rounded weights of each `Float8Linear` from an update's first forward to its step."""

    name = "fp8_weights"
    needs_views = False  # a model in fp8 is under autocast, and so has a view

    def __init__(self) -> None:
        self._layers: dict[int, list[Any]] = {}  # by id of a model's route
        self._removals = ExitStack()

    def begin(self) -> None:
        if not self.run.precision.rounds:
            self.run.parts.remove(self)

    def prepared(self, objects: Sequence[Any]) -> None:
        if self.run.prepared.strategy.sharded:
            return  # weights are rounded after each gather
        for route in self.run.prepared.routes_of(objects):
            self._layers[id(route)] = [
                m for m in route.original.modules() if isinstance(m, Float8Linear) and "weight" in m._parameters
            ]
            # Of optimizers that are not prepared.
            hook = register_optimizer_step_post_hook(partial(forget_rounded, self._layers[id(route)]))
            self._removals.callback(hook.remove)

    def forward(self, model: Route, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        round_once(self._layers.get(id(model), ()))

    def stepped(self, optimizer: Any) -> None:
        for layers in self._layers.values():
            forget_rounded(layers)

    def released(self) -> None:
        self.stepped(None)
        self._layers.clear()
        self._removals.close()
