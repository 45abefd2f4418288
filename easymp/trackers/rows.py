"""What one call of `log` may hold, checked on every rank alike: a row of numbers and words by name."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..base.dtensor import local
from ..errors import SettingError

PLAIN = (float, int, str, bool)


@dataclass
class Row:
    """What was logged at once.

    Attributes:
        step: the script's, or the number of optimizer updates.
        time: seconds since 1970, when it was logged.
        values: numbers and words by name; until they have come from the device, tensors among them.
        options: by a tracker's name, more that its own log call takes.
        updates: optimizer updates that had been made.
    """

    step: int
    time: float
    values: dict[str, Any]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    updates: int = 0


def checked_step(step: Any) -> int:
    """A step as a whole number."""
    if isinstance(step, (Tensor, bool)):
        raise SettingError(
            f"log(step=...) got a {type(step).__name__}: pass a whole number, or leave it out to count updates"
        )
    try:
        return operator.index(step)
    except TypeError:
        raise SettingError(
            f"log(step={step!r}) is no whole number: pass one, or leave it out to count optimizer updates"
        ) from None


def checked_values(values: Any) -> dict[str, Any]:
    """The values by name, dicts inside them flattened (``{"loss": {"train": 1}}`` is ``"loss/train"``), and without those that are None.

    Tensors stay tensors, without graph; nothing waits for a device.

    Raises:
        SettingError: what is no number and no word.
    """
    if not isinstance(values, Mapping):
        raise SettingError(
            f"log() got a {type(values).__name__}: pass a dict of numbers by name, such as {{'loss': loss}}"
        )
    return dict(_flat(values, ""))


def _flat(values: Mapping[Any, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if not isinstance(key, str):
            raise SettingError(f"log() got {key!r} as a name: names are words, such as 'loss'. Use one")
        name = f"{above}{key}"
        if type(value) in PLAIN:
            yield name, value
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{name}/")
        elif value is not None:
            yield name, _scalar(name, value)


def _scalar(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return _tensor(name, value)
    if isinstance(value, PLAIN):
        return value
    if (
        callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0
    ):  # NumPy's scalars and arrays of none dimensions
        return _scalar(name, value.item())
    if isinstance(value, numbers.Real):
        return float(value)
    raise SettingError(
        f"log({{{name!r}: ...}}) got a {type(value).__name__}, which is no number and no word: for pictures, tables and files use the "
        "tracker itself, acc.get_tracker(name)"
    )


def _tensor(name: str, value: Tensor) -> Tensor:
    if value.ndim:
        raise SettingError(
            f"log({{{name!r}: ...}}) got a tensor of shape {tuple(value.shape)}: reduce it to one number first, such as "
            f"{name}.mean()"
        )
    if value.is_complex() or value.is_meta:
        raise SettingError(
            f"log({{{name!r}: ...}}) got a tensor of {value.dtype} on {value.device}: it has no real value. Log a real "
            "number in its place, or leave it out"
        )
    if any(not placement.is_replicate() for placement in getattr(value, "placements", ())):
        raise SettingError(
            f"log({{{name!r}: ...}}) got a DTensor of which each rank has a part: call {name}.full_tensor() first, on all ranks"
        )
    return local(value.detach())
