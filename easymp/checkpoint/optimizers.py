"""An optimizer's state in a checkpoint: by names of parameters, so that it fits another order of them, and other shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..optim import PreparedOptimizer
from .places import place_of
from .snapshot import Reading, Snapshot


class OptimizerState:
    """Param groups, what is remembered of each parameter, and fp32 masters.

    Args:
        name: "optimizer", or "optimizer_1" and so on.
        owner: id of a parameter → its name.
        apart: each rank remembers something else, of the same parameters.
    """

    def __init__(self, name: str, optimizer: PreparedOptimizer, owner: Mapping[int, str], apart: bool = False) -> None:
        self._name, self._optimizer, self._apart = name, optimizer, apart
        self._masters = optimizer.masters
        back = {id(master): parameter for parameter, master in self._masters}
        self._names = {id(p): owner[id(back.get(id(p), p))] for group in optimizer.param_groups for p in group["params"]}

    def bring(self, into: Snapshot) -> None:
        inner = self._optimizer
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [self._names[id(p)] for p in group["params"]]}
            for group in inner.param_groups
        ]
        state = {self._names[id(p)]: dict(inner.state[p]) for p in self._parameters() if inner.state.get(p)}
        masters = {self._names[id(master)]: master for _, master in self._masters}
        into.add(self._name, {"groups": groups, "updates": inner.updates})
        into.add(f"{self._name}/state", state, own=self._apart)
        into.add(f"{self._name}/masters", masters)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def take(self, source: Reading) -> Callable[[], None]:
        saved = source.state(self._name)
        inner = self._optimizer
        parameters = {self._names[id(p)]: p for p in self._parameters()}
        if [sorted(g["params"]) for g in saved["groups"]] != [
            sorted(self._names[id(p)] for p in g["params"]) for g in inner.param_groups
        ]:
            raise CheckpointError(f"{self._name}: the checkpoint has other param groups")
        fills: list[tuple[Tensor, Tensor]] = []
        fresh: dict[str, Any] = {}
        names = source.state(f"{self._name}/state", own=self._apart, tensor=lambda name: name)
        for name in names:
            if place_of(parameters[name]) is not None:
                like = inner.laid_out(parameters[name])
                fresh[name] = self._fresh(source, name, like, fills)
        masters = {self._names[id(master)]: master for _, master in self._masters}
        for name, path in source.state(f"{self._name}/masters", tensor=lambda name: name).items():
            for box, part in place_of(masters[name]).parts:
                fills.append((part, source.part(path, box)))

        def put() -> None:
            with torch.no_grad():
                for part, tensor in fills:
                    part.copy_(tensor)
            for live, group in zip(inner.param_groups, saved["groups"]):
                live.update({k: v for k, v in group.items() if k not in ("params", "fused", "foreach")})
            inner.remember({parameters[name]: state for name, state in fresh.items()})
            inner.updates = saved["updates"]

        return put

    def _fresh(self, source: Reading, name: str, like: Tensor, fills: list[tuple[Tensor, Tensor]]) -> Any:
        """The state of one parameter, in new tensors laid out as the parameter is, where they have its shape."""

        def tensor(path: str) -> Tensor:
            stored = source.stored(path)
            if stored.shape != tuple(like.shape):
                return source.whole(path)
            made = torch.empty_like(like, dtype=stored.dtype)
            for box, part in place_of(made).parts:
                fills.append((part, source.part(path, box)))
            return made

        return source.state(f"{self._name}/state", own=self._apart, tensor=tensor)[name]
