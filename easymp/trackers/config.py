"""Hyperparameters as plain values: what scripts have (argparse's Namespace, dataclasses, dicts of anything) as what trackers take."""

from __future__ import annotations

import argparse
import dataclasses
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


def flat(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """A plain dict without dicts inside: ``{"model": {"depth": 2}}`` is ``{"model/depth": 2}``; lists become text."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            found.update(flat(value, f"{above}{key}/"))
        else:
            found[f"{above}{key}"] = str(value) if isinstance(value, list) else value
    return found
