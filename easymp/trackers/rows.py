"""The values that `log` takes: checked on every rank alike, then fetched from the device without waiting for it.

A tensor on an accelerator is copied on the device at once, because it may change in place afterwards. About once a second all those
copies go to pinned host memory in one transfer, and an event tells when it has arrived. On devices without events (Apple's) that
transfer waits for the device.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import numbers
import operator
from collections import deque
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.dtensor import local
from ..base.units import flat
from ..errors import SettingError

PLAIN = (float, int, str, bool)
HOST = "cpu"
EVENTS = ("cuda", "xpu")  # devices whose transfers to pinned memory run while the host continues


@dataclass
class Row:
    """The values of one call of `log`."""

    step: int  # the script's, or the number of optimizer updates
    time: float  # seconds since 1970
    values: dict[str, Any]  # numbers and words by name; tensors among them until they arrive from the device
    options: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # of a tracker's own log call, by its name
    updates: int = 0  # optimizer updates made by then


# -- checks ------------------------------------------------------------------------------------------------------------


def checked_step(step: Any) -> int:
    """A step as a whole number."""
    try:
        if not isinstance(step, (Tensor, bool)):
            return operator.index(step)
    except TypeError:
        pass
    raise SettingError(
        f"log(step={step!r}): pass a whole number, or leave step out to count optimizer updates"
    )


def checked_values(values: Any) -> dict[str, Any]:
    """The values by name, dicts inside them flattened (``{"loss": {"train": 1}}`` is ``"loss/train"``), without those that are None.

    Tensors stay tensors, without graph; nothing waits for a device.
    """
    if not isinstance(values, Mapping):
        raise SettingError(
            f"log() got a {type(values).__name__}: pass a dict of numbers by name, such as {{'loss': loss}}"
        )
    return dict(_flat_values(values, ""))


def _flat_values(values: Mapping[Any, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if not isinstance(key, str):
            raise SettingError(f"log() got {key!r} as a name: names are words, such as 'loss'")
        name = f"{above}{key}"
        if type(value) in PLAIN:
            yield name, value
        elif isinstance(value, Mapping):
            yield from _flat_values(value, f"{name}/")
        elif value is not None:
            yield name, _scalar(name, value)


def _scalar(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return _tensor(name, value)
    if isinstance(value, PLAIN):
        return value
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:  # NumPy's scalars
        return _scalar(name, value.item())
    if isinstance(value, numbers.Real):
        return float(value)
    raise SettingError(
        f"log({{{name!r}: ...}}) got a {type(value).__name__}, which is neither a number nor a word: for pictures, tables and files "
        "use the tracker itself, acc.get_tracker(name)"
    )


def _tensor(name: str, value: Tensor) -> Tensor:
    if value.ndim:
        why = f"a tensor of shape {tuple(value.shape)}: reduce it to one number first, such as {name}.mean()"
    elif value.is_complex() or value.is_meta:
        why = f"a tensor of {value.dtype} on {value.device}: it has no real value. Log a real number, or leave it out"
    elif any(not placement.is_replicate() for placement in getattr(value, "placements", ())):
        why = f"a DTensor that is split over the ranks: call {name}.full_tensor() first, on all ranks"
    else:
        return local(value.detach())
    raise SettingError(f"log({{{name!r}: ...}}) got {why}")


# -- numbers on their way from the device ------------------------------------------------------------------------------

Place = tuple[Row, str, Tensor]  # a row, the name of a value in it, and the tensor that holds the value


class Transfer(NamedTuple):
    """Values of one device and dtype on their way to the host."""

    places: list[Place]
    host: Tensor
    event: Any  # None: they have arrived


class Pending:
    """Rows with numbers on their way from the device, in the order of logging."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._places: list[Place] = []
        self._streams: set[Any] = set()
        self._sent: deque[tuple[list[Row], list[Transfer]]] = deque()

    def __len__(self) -> int:
        """Rows that have not been sent."""
        return len(self._rows)

    def __bool__(self) -> bool:
        return bool(self._rows or self._sent)

    def add(self, row: Row) -> None:
        self._rows.append(row)
        for name, value in row.values.items():
            if not isinstance(value, Tensor):
                continue
            if value.device.type == HOST:
                row.values[name] = value.item()
                continue
            self._places.append((row, name, value.clone()))
            if value.device.type in EVENTS:
                self._streams.add(torch.get_device_module(value.device).current_stream(value.device))

    def send(self) -> None:
        """Start the transfer of all that was added."""
        if not self._rows:
            return
        groups: dict[tuple[torch.device, torch.dtype], list[Place]] = {}
        for place in self._places:
            groups.setdefault((place[2].device, place[2].dtype), []).append(place)
        transfers = [self._transfer(device, group) for (device, _), group in groups.items()]
        self._sent.append((self._rows, transfers))
        self._rows, self._places, self._streams = [], [], set()

    def _transfer(self, device: torch.device, group: list[Place]) -> Transfer:
        tensors = [tensor for _, _, tensor in group]
        if device.type not in EVENTS:
            return Transfer(group, torch.stack(tensors).cpu(), None)
        module = torch.get_device_module(device)
        with module.device(device):
            here = module.current_stream(device)
            for stream in self._streams:
                if stream.device == device and stream != here:
                    here.wait_stream(stream)
            host = torch.empty(len(group), dtype=tensors[0].dtype, pin_memory=True)
            host.copy_(torch.stack(tensors), non_blocking=True)
            event = module.Event()
            event.record(here)
        return Transfer(group, host, event)

    def arrived(self, wait: bool = False) -> list[Row]:
        """Remove and return the rows whose numbers have arrived; with `wait` all that were sent."""
        rows: list[Row] = []
        while self._sent:
            sent, transfers = self._sent[0]
            events = [transfer.event for transfer in transfers if transfer.event is not None]
            if wait:
                for event in events:
                    event.synchronize()
            elif not all(event.query() for event in events):
                break
            for transfer in transfers:
                for (row, name, _), number in zip(transfer.places, transfer.host.tolist()):
                    row.values[name] = number
            rows += sent
            self._sent.popleft()
        return rows


# -- hyperparameters ---------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """`value` as dicts, lists, numbers, words and None; anything else as its `str`."""
    if value is None or type(value) in PLAIN:
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
    """A plain value as JSON; numbers that are not finite become the words "NaN", "Infinity" and "-Infinity"."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return value


def concise(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's plain config in one level, with the plan's values and the machine's names only: for lists of parameters."""
    about = config["easymp"]
    plan = {name: said["value"] if isinstance(said, dict) else said for name, said in about["plan"].items()}
    devices = [device["name"] for device in about["machine"]["devices"]]
    machine = {
        "cpu": about["machine"]["cpu"]["name"],
        "devices": ", ".join(f"{devices.count(d)} × {d}" for d in dict.fromkeys(devices)),
    }
    return flat({**config, "easymp": {"version": about["version"], "plan": plan, "machine": machine}})
