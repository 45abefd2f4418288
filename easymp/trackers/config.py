"""Hyperparameters as plain values: what scripts have (argparse's Namespace, dataclasses, dicts of anything) as what trackers take."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Mapping, Set
from enum import Enum
from typing import Any

from torch import Tensor


def plain(value: Any) -> Any:
    """`value` in dicts, lists, numbers, words and None; what is none of these in its own words, by `str`."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, argparse.Namespace):
        return plain(vars(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Set):
        return sorted((plain(item) for item in value), key=str)
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Tensor) and value.ndim == 0:
        return value.item()
    return str(value)


def as_json(value: Any, indent: int | None = None) -> str:
    """A plain value as JSON, with the words "NaN", "Infinity" and "-Infinity" for the numbers that JSON has not."""
    return json.dumps(_valid(value), indent=indent, allow_nan=False)


def _valid(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _valid(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_valid(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return value


def concise(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's plain config in one level, with of the plan the values only, and of the machine the names: for lists of parameters."""
    about = config["easymp"]
    plan = {name: said["value"] if isinstance(said, dict) else said for name, said in about["plan"].items()}
    devices = [device["name"] for device in about["machine"]["devices"]]
    machine = {
        "cpu": about["machine"]["cpu"]["name"],
        "devices": ", ".join(f"{devices.count(d)} × {d}" for d in dict.fromkeys(devices)),
    }
    return flat({**config, "easymp": {"version": about["version"], "plan": plan, "machine": machine}})


def flat(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """A plain dict without dicts inside: ``{"model": {"depth": 2}}`` is ``{"model/depth": 2}``; lists become text."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            found.update(flat(value, f"{above}{key}/"))
        else:
            found[f"{above}{key}"] = str(value) if isinstance(value, list) else value
    return found
