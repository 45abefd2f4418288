"""A model's parameters and buffers in a checkpoint, by the names that the user's module gives them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..precision.mixed import LOW
from .boxes import Box
from .fitting import names_apart, several
from .manifest import Stored
from .names import canonical
from .places import Place, place_of
from .snapshot import FullName, Reading, Snapshot, Trial


def nothing() -> None:
    """Puts nothing into place."""


class ModelState:
    """What `state_dict` of the user's module shows, whatever a strategy made of its tensors.

    Tensors are written to in place. What is no tensor of the module's own (extra state, what a hook of `state_dict` makes) goes through
    `load_state_dict`. Of low-precision parameters whose optimizer kept fp32 masters, a model in fp32 takes the masters; and parameters
    that have masters here take what was saved in fp32, rounded, as their masters take it whole. fp32 parameters take bf16 and fp16 ones.

    Args:
        name: "model", or "model_1" and so on.
        mastered: ids of parameters that have masters here.
    """

    def __init__(self, name: str, module: nn.Module, mastered: Collection[int] = ()) -> None:
        self._name, self._module, self._mastered = name, module, mastered

    def bring(self, into: Snapshot) -> None:
        first: dict[int, str] = {}
        tree: dict[str, Any] = {}
        own = self._own()
        for name, value in self._module.state_dict(keep_vars=True).items():
            name = canonical(name)
            if id(value) in own:
                if id(value) in first:
                    into.aliases[f"{self._name}/{name}"] = f"{self._name}/{first[id(value)]}"
                    continue
                first[id(value)] = name
            tree[name] = value
        # A BatchNorm's statistics are each rank's own until a forward shares rank 0's.
        into.add(self._name, tree, alike={id(p) for p in self._module.parameters()})

    def _own(self) -> set[int]:
        return {id(t) for t in [*self._module.parameters(), *self._module.buffers()]}

    def take(self, source: Reading) -> Callable[[], None]:
        if self._name not in source:
            source.complain(f"the checkpoint has no {self._name}")
            return nothing
        saved = source.state(self._name, tensor=FullName)
        prefix = f"{self._name}/"
        saved.update(
            {
                k.removeprefix(prefix): FullName(of)
                for k, of in source.manifest.aliases.items()
                if k.startswith(prefix)
            }
        )
        live = {
            canonical(name): (name, value) for name, value in self._module.state_dict(keep_vars=True).items()
        }
        own = self._own()
        if words := names_apart(live, saved):
            source.complain(f"{self._name}: {words}")
        fills: list[tuple[str, Box, Tensor]] = []
        filled: dict[int, tuple[str, Stored]] = {}  # id of a live tensor → its first name, and what it takes
        rest: list[str] = []
        faults: list[str] = []
        for name in [name for name in live if name in saved]:
            value, there = live[name][1], saved[name]
            if id(value) not in own:
                rest.append(name)
            elif fault := "is no tensor in the checkpoint" if not isinstance(there, FullName) else "":
                faults.append(f"{name} {fault}")
            elif (place := place_of(value)) is not None:
                path = self._path(there, value, source)
                first, known = filled.setdefault(id(value), (name, source.stored(path)))
                if fault := self._fault(source.stored(path), place, value):
                    faults.append(f"{name} {fault}")
                elif known is not source.stored(path):
                    faults.append(f"{name} and {first} are one tensor here, and two in the checkpoint")
                elif first == name:
                    fills += [(path, box, part) for box, part in place.parts]
        if faults:
            source.complain(f"{self._name}: {several(faults)}")
        if rest:
            values = {live[name][0]: source.state(self._name, within=[name]) for name in rest}
            source.trials.append(
                self._trial(values, {live[name][0]: live[name][1] for name in rest}, source.strict)
            )
        return source.overwriting(fills)

    def _path(self, name: FullName, value: Tensor, source: Reading) -> str:
        """The tensor to read for `value`: of low-precision parameters the master, for a model in fp32."""
        master = source.master(name)
        return master if master is not None and value.dtype == torch.float32 else name

    def _fault(self, stored: Stored, place: Place, value: Tensor) -> str:
        if stored.shape != place.shape:
            return f"has shape {list(stored.shape)} in the checkpoint, and {list(place.shape)} here"
        mastered = stored.dtype == torch.float32 and id(value) in self._mastered
        raised = (
            stored.dtype in LOW and value.dtype == torch.float32
        )  # by "bf16" and "fp16", at `prepare`; exact
        if stored.dtype != value.dtype and not mastered and not raised:
            return f"is {stored.dtype} in the checkpoint, and {value.dtype} here (load_weights converts)"
        return ""

    def _trial(self, values: dict[str, Any], before: dict[str, Any], strict: bool) -> Trial:
        """What is no tensor of the module's own, given to its `load_state_dict`."""
        before = dict(_copies(before))

        def change() -> None:
            ignored = [
                name
                for name in self._module.load_state_dict(values, strict=False).unexpected_keys
                if name in values
            ]
            if ignored and strict:
                raise CheckpointError(
                    f"load_state_dict does not know {several(ignored)}, which state_dict shows: take it with a hook"
                )

        def undo() -> None:
            self._module.load_state_dict(before, strict=False)

        return Trial(self._name, change, undo)


def _copies(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        yield name, value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
