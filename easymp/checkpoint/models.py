"""A model's parameters and buffers in a checkpoint, by the names that the user's module gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from .places import Place, place_of
from .snapshot import Reading, Snapshot

COMPILED = "_orig_mod."


def canonical(name: str) -> str:
    """A name without what torch.compile puts in."""
    return name.replace(COMPILED, "")


class ModelState:
    """What `state_dict` of the user's module shows, whatever a strategy made of its tensors.

    Tensors are written to in place. What is no tensor of the module's own (extra state, what a hook of `state_dict` makes) goes through
    `load_state_dict`.

    Args:
        name: "model", or "model_1" and so on.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._module = name, module

    def bring(self, into: Snapshot) -> None:
        first: dict[int, str] = {}
        tree: dict[str, Any] = {}
        for name, value in self._module.state_dict(keep_vars=True).items():
            name = canonical(name)
            if isinstance(value, nn.Parameter) and id(value) in first:
                into.aliases[f"{self._name}/{name}"] = f"{self._name}/{first[id(value)]}"
                continue
            if isinstance(value, Tensor):
                first[id(value)] = name
            tree[name] = value
        into.add(self._name, tree)

    def take(self, source: Reading) -> Callable[[], None]:
        saved = source.state(self._name, tensor=lambda name: name)
        saved.update({k.partition("/")[2]: of for k, of in source.manifest.aliases.items() if k.startswith(f"{self._name}/")})
        live = {canonical(name): (name, value) for name, value in self._module.state_dict(keep_vars=True).items()}
        own = {id(t) for t in [*self._module.parameters(), *self._module.buffers()]}
        missing, left = sorted(live.keys() - saved.keys()), sorted(saved.keys() - live.keys())
        if missing or left:
            source.complain(f"{self._name}: the checkpoint lacks {missing} and has {left} beside")
        fills: list[tuple[Tensor, Tensor]] = []
        rest: dict[str, Any] = {}
        for name in live.keys() & saved.keys():
            real, value = live[name]
            if not isinstance(value, Tensor) or id(value) not in own:
                rest[real] = source.state(self._name)[name]
                continue
            place = place_of(value)
            if place is None:
                continue
            self._check(name, place, value, source)
            fills += [(part, source.part(saved[name], box)) for box, part in place.parts]

        def put() -> None:
            with torch.no_grad():
                for part, fresh in fills:
                    part.copy_(fresh)
            if rest:
                self._module.load_state_dict(rest, strict=False)

        return put

    def _check(self, name: str, place: Place, value: Tensor, source: Reading) -> None:
        stored = source.stored(f"{self._name}/{name}")
        if stored.shape != place.shape:
            raise CheckpointError(
                f"{self._name}/{name} has shape {stored.shape} in the checkpoint, and {place.shape} here: build the model that was saved"
            )
        if stored.dtype != value.dtype:
            raise CheckpointError(
                f"{self._name}/{name} is {stored.dtype} in the checkpoint, and {value.dtype} here: convert the model, or use load_weights "
                "with a dtype"
            )
