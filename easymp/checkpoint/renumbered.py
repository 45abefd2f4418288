"""What Accelerate's folders say by order, or by names of wrappers, in the names that things have here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from ..errors import CheckpointError
from .names import canonical, without_wrappers
from .optimizers import OptimizerState


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
    names = {
        number: name for group, names in zip(saved, groups) for number, name in zip(group["params"], names)
    }
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
