"""A folder of Accelerate's `save_state`, told in the words of our own checkpoints, so that it goes the same way into what is live.

What it says by order (parameters of an optimizer, objects of a run) is taken in the order of what is live here.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from .accelerate_folder import AccelerateStates, read_accelerate
from .boxes import whole
from .local import LocalStorage
from .manifest import Manifest
from .names import canonical, without_wrappers
from .optimizers import OptimizerState
from .slabs import Want
from .snapshot import Reading
from .storage import Tick, nothing
from .stored import Piece, Stored
from .training import numbered
from .trees import pack

LOADERS = "where loaders stood (Accelerate's folders do not say it; go on with skip_first_batches)"


class Translated(Reading):
    """Such a folder, all of it in memory.

    Args:
        models: those that take the weights, in the order in which they were prepared.
        optimizers: likewise.
        seed: of the run that loads.
        allow_pickle: see `read_accelerate`.

    Raises:
        CheckpointError: as `read_accelerate`; or an optimizer that had other param groups.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        models: Sequence[nn.Module],
        optimizers: Sequence[OptimizerState],
        seed: int,
        rank: int = 0,
        strict: bool = True,
        allow_pickle: bool = False,
    ) -> None:
        found = read_accelerate(folder, allow_pickle)
        self._tensors: dict[str, Tensor] = {}
        states, aliases = self._states(found, models, optimizers, seed)
        tensors = {
            name: Stored(t.dtype, tuple(t.shape), (Piece(whole(tuple(t.shape)), name, 0),)) for name, t in self._tensors.items()
        }
        step = max((states[o.name]["updates"] for o in optimizers if o.name in states), default=0)
        manifest = Manifest(step, max(len(found.rng), 1), "", "Accelerate", {}, tensors, {}, states, aliases)
        super().__init__(LocalStorage(folder), "", manifest, rank, strict)

    def run(self, tick: Tick = nothing) -> None:
        with torch.no_grad():
            for want in self._wanted:
                want.into.copy_(self._within(want))
        self._wanted.clear()

    def _within(self, want: Want) -> Tensor:
        values = self._tensors[want.stored.pieces[0].file]
        for dim, (offset, count) in enumerate(zip(want.box.offset, want.box.shape)):
            values = values.narrow(dim, offset, count)
        return values

    def _pack(self, name: str, value: Any) -> Any:
        return pack(value, name, self._tensors)

    def _states(
        self, found: AccelerateStates, models: Sequence[nn.Module], optimizers: Sequence[OptimizerState], seed: int
    ) -> tuple[dict[str, Any], dict[str, str]]:
        trees: dict[str, Any] = {}
        aliases: dict[str, str] = {}
        for i, weights in enumerate(found.models):
            name = numbered("model", i)
            live = models[i].state_dict(keep_vars=True) if i < len(models) else {}
            trees[name] = named_as({canonical(n) for n in live}, weights)
            aliases |= {f"{name}/{n}": f"{name}/{of}" for n, of in tied(live, trees[name])}
        for i, state in enumerate(found.optimizers):
            name = numbered("optimizer", i)
            if i < len(optimizers):
                trees[name], trees[f"{name}/state"] = by_name(state, optimizers[i])
                trees[f"{name}/masters"] = {}
            else:
                trees[name] = {}  # nobody takes it, which is said
        trees |= {f"state/scheduler_{i}": state for i, state in enumerate(found.schedulers)}
        trees |= {f"state/object_{i}": state for i, state in enumerate(found.custom)}
        if found.scaler:
            trees["state/scaler"] = found.scaler
        for rank, streams in found.rng.items():
            slices = {"data_rank": rank, "data_size": len(found.rng), "seed": seed}
            trees[f"ranks/{rank:05d}/state/random"] = {**slices, "streams": streams_of(streams)}
        return {name: self._pack(name, tree) for name, tree in trees.items()}, aliases


def named_as(live: Collection[str], weights: Mapping[str, Any]) -> dict[str, Any]:
    """`weights` by the names of the live model: without those of wrappers, where it has none."""
    return {name if name in live else without_wrappers(name): value for name, value in weights.items()}


def tied(live: Mapping[str, Any], there: Collection[str]) -> list[tuple[str, str]]:
    """Names of the live model that are not there, each with the one that is, of the same tensor: of tied weights, one is written."""
    first = {id(value): canonical(name) for name, value in live.items() if canonical(name) in there}
    missing = [(canonical(name), id(value)) for name, value in live.items() if canonical(name) not in there]
    return [(name, first[value]) for name, value in missing if value in first]


def by_name(state: Mapping[str, Any], optimizer: OptimizerState) -> tuple[dict[str, Any], dict[str, Any]]:
    """What torch's `state_dict` of an optimizer says by numbers of parameters, by the names that they have here."""
    kind, groups = optimizer.layout()
    saved = state["param_groups"]
    if [len(group["params"]) for group in saved] != [len(names) for names in groups]:
        raise CheckpointError(
            f"{optimizer.name} had param groups of {[len(group['params']) for group in saved]} parameters, and has "
            f"{[len(names) for names in groups]} here: Accelerate's folders say by order which parameter is which"
        )
    names = {number: name for group, names in zip(saved, groups) for number, name in zip(group["params"], names)}
    told = [{**group, "params": names} for group, names in zip(saved, groups)]
    remembered = {names[number]: entry for number, entry in state["state"].items() if number in names}
    updates = max((int(entry["step"]) for entry in remembered.values() if "step" in entry), default=0)
    shared = {key: entry for key, entry in state["state"].items() if key not in names}
    rest = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    return {"kind": kind, "groups": told, "updates": updates, "shared": shared, "rest": rest}, remembered


def streams_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Random streams as `streams.states` has them; accelerators' begin anew."""
    version, words, gauss = found["random_state"]
    streams: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "torch": found["torch_manual_seed"],
        "devices": {},
    }
    if "numpy_random_seed" in found:
        kind, key, place, has_gauss, cached = found["numpy_random_seed"]
        streams["numpy"] = {
            "kind": str(kind),
            "words": torch.tensor(key.tolist()),
            "rest": [int(place), int(has_gauss), float(cached)],
        }
    return streams
