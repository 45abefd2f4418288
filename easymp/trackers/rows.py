"""The values that `log`, `log_images` and `log_table` take, checked on every rank alike. Numbers come without waiting for the device.

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
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..base.dtensor import local
from ..base.units import flat
from ..errors import SettingError

PLAIN = (float, int, str, bool)
FACTS = "easymp"  # key of the plan and the machine beside the script's hyperparameters
HOST = "cpu"
EVENTS = ("cuda", "xpu")  # devices whose transfers to pinned memory run while the host continues


@dataclass
class Row:
    """The values of one call of `log`."""

    step: int  # the script's, or the number of optimizer updates
    time: float  # seconds since 1970
    values: dict[str, Any]  # numbers and words by name; tensors among them until they arrive from the device
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of log calls, by tracker
    updates: int = 0  # optimizer updates made by then


# -- checks ------------------------------------------------------------------------------------------------------------


def checked_step(step: Any) -> int:
    """A step as a whole number."""
    with suppress(TypeError):
        if not isinstance(step, (Tensor, bool)):
            return operator.index(step)
    words = "pass a whole number, or leave step out to count optimizer updates"
    raise SettingError(f"log(step={step!r}): {words}")


def checked_values(values: Any) -> dict[str, Any]:
    """The values by name, dicts inside them flattened (``{"loss": {"train": 1}}`` is ``"loss/train"``), without those that are None.

    Tensors stay tensors, without graph; nothing waits for a device.
    """
    if not isinstance(values, Mapping):
        words = "pass a dict of numbers by name, such as {'loss': loss}"
        raise SettingError(f"log() got a {type(values).__name__}: {words}")
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
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        if value.ndim:
            why = f"a tensor of shape {tuple(value.shape)}: reduce it to one number first, such as {name}.mean()"
        elif value.is_complex() or value.is_meta:
            why = f"a tensor of {value.dtype} on {value.device}: it has no real value. Log a real number, or leave it out"
        elif any(not placement.is_replicate() for placement in getattr(value, "placements", ())):
            why = f"a DTensor that is split over the ranks: call {name}.full_tensor() first, on all ranks"
        else:
            return local(value.detach())
        raise SettingError(f"log({{{name!r}: ...}}) got {why}")
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:  # NumPy's scalars
        return _scalar(name, value.item())
    if isinstance(value, numbers.Real):
        return float(value)
    raise SettingError(
        f"log({{{name!r}: ...}}) got a {type(value).__name__}, which is neither a number nor a word: for images and tables there are "
        "acc.log_images and acc.log_table, for files the tracker itself, acc.get_tracker(name)"
    )


# -- images and tables -------------------------------------------------------------------------------------------------

CHANNELS = (1, 3, 4)  # grey, RGB, RGBA


def checked_images(images: Any, convert: bool = True) -> tuple[Any, str]:
    """One image or several of one size as a uint8 array of shape NHWC, and what had to be changed in their values, or "".

    Without `convert`, shapes and dtypes are checked only, and nothing waits for a device.
    """
    several = isinstance(images, (list, tuple))
    found = [one if isinstance(one, Tensor) else np.asarray(one) for one in (images if several else [images])]
    shapes, kinds = {tuple(one.shape) for one in found}, {_kind(one) for one in found}
    if len(shapes) != 1 or len(kinds) != 1 or kinds == {""}:
        types = sorted({str(one.dtype) for one in found})
        are = f"of shapes {sorted(shapes)} and dtypes {types}" if found else "empty"
        raise SettingError(
            f"log_images() got images that are {are}: pass images of one size, as uint8 or floats in 0 … 1"
        )
    shape = (len(found), *shapes.pop()) if several else shapes.pop()
    axes = _axes(shape, first=isinstance(found[0], Tensor))
    if not convert:
        return None, ""
    arrays = [_array(one) if isinstance(one, Tensor) else one for one in found]
    whole = np.moveaxis((np.stack(arrays) if several else arrays[0])[axes[0]], axes[1], -1)
    if kinds == {"uint8"}:
        return np.ascontiguousarray(whole), ""
    good = np.nan_to_num(whole.astype(np.float32))
    least, most = good.min(), good.max()
    said = [f"values from {least:.3g} to {most:.3g} are cut to 0 … 1"] if least < 0 or most > 1 else []
    said += ["NaN becomes 0"] if np.isnan(whole).any() else []
    return np.round(good.clip(0, 1) * 255).astype(np.uint8), " and ".join(said)


def _kind(image: Any) -> str:
    """The word "uint8", or "float" (truth values, too), or "" for other dtypes."""
    name = str(image.dtype).removeprefix("torch.")
    return "float" if "float" in name or name == "bool" else name if name == "uint8" else ""


def _array(image: Tensor) -> Any:
    image = local(image.detach()).cpu()
    return image.float().numpy() if image.is_floating_point() else image.numpy()


def _axes(shape: tuple[int, ...], first: bool) -> tuple[Any, int]:
    """The index that makes four dimensions of `shape`, and the place of the channels in these; `first`: looked for there first."""
    head, tail = shape[-3:-2] or (0,), shape[-1:] or (0,)
    before, after = head[0] in CHANNELS, tail[0] in CHANNELS
    place = -3 if before and (first or not after) else -1
    if len(shape) == 4 and (before or after):
        return np.s_[:], place
    if len(shape) == 3 and (before or after):
        return np.s_[None], place
    if len(shape) == 3:  # grey ones
        return np.s_[..., None], -1
    if len(shape) == 2:
        return np.s_[None, ..., None], -1
    raise SettingError(
        f"log_images() got an array of shape {shape}: pass NHWC or NCHW with {', '.join(map(str, CHANNELS))} channels, one image "
        "without N, or grey ones without C"
    )


def checked_table(columns: Any, rows: Any) -> tuple[list[str], list[list[Any]]]:
    """Names of columns, and rows of numbers, words and None. Waits for the device of tensors."""
    names = [] if isinstance(columns, str) else list(columns)
    words = all(isinstance(name, str) and name and not name.startswith("_") for name in names)
    if not names or not words or len({*names}) < len(names):
        raise SettingError(
            f"log_table(columns={columns!r}): pass a list of words, each once, that do not begin with an underscore"
        )
    found = [list(row) for row in rows]
    for row in found:
        if len(row) != len(names):
            few = f"a row of {len(row)} values for {len(names)} columns"
            raise SettingError(f"log_table() got {few}: {row!r:.200}")
    return names, [[_cell(name, value) for name, value in zip(names, row)] for row in found]


def _cell(column: str, value: Any) -> Any:
    value = None if value is None else _scalar(column, value)
    return value.item() if isinstance(value, Tensor) else value


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
            if isinstance(value, Tensor) and value.device.type == HOST:
                row.values[name] = value.item()
            elif isinstance(value, Tensor):
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
    made = {name: said for name, said in about["plan"].items() if not isinstance(said, list)}  # candidates
    plan = {name: said["value"] if isinstance(said, dict) else said for name, said in made.items()}
    devices = [device["name"] for device in about["machine"]["devices"]]
    kinds = ", ".join(f"{devices.count(d)} × {d}" for d in dict.fromkeys(devices))
    machine = {"cpu": about["machine"]["cpu"]["name"], "devices": kinds}
    return flat({**config, "easymp": {"version": about["version"], "plan": plan, "machine": machine}})
