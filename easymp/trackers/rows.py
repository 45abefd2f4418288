"""The values that `log`, `log_images` and `log_table` take, checked on every rank alike, without a wait for the device.

A tensor on an accelerator is copied there at once, because it may change in place afterwards. About once a second all
those copies go to pinned host memory in one transfer, and an event tells when it has arrived. On devices without events
(Apple's) that transfer waits for the device.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import numbers
import operator
from collections import Counter, deque
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
    with suppress(TypeError):
        if not isinstance(step, (Tensor, bool)):
            return operator.index(step)
    raise SettingError(f"log(step={step!r}): pass a whole number, or leave step out to count optimizer updates")


def checked_values(values: Any) -> dict[str, Any]:
    """The values by name without None. Dicts inside are flattened: ``{"loss": {"train": 1}}`` is ``"loss/train"``.

    Tensors stay tensors, without graph; nothing waits for a device.
    """
    if not isinstance(values, Mapping):
        remedy = "pass a dict of numbers by name, such as {'loss': loss}"
        raise SettingError(f"log() got a {type(values).__name__}: {remedy}")
    return dict(_flat_values(values, ""))


def _flat_values(values: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if not isinstance(key, str):
            raise SettingError(f"log() got {key!r} as a name: names are words, such as 'loss'")
        name = f"{prefix}{key}"
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
            problem = f"a tensor of shape {tuple(value.shape)}: reduce it to one number first, such as {name}.mean()"
        elif value.is_complex() or value.is_meta:
            tensor = f"a tensor of {value.dtype} on {value.device}"
            problem = f"{tensor}: it has no real value. Log a real number, or leave it out"
        elif any(not placement.is_replicate() for placement in getattr(value, "placements", ())):
            problem = f"a DTensor that is split over the ranks: call {name}.full_tensor() first, on all ranks"
        else:
            return local(value.detach())
        raise SettingError(f"log({{{name!r}: ...}}) got {problem}")
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:  # NumPy's scalars
        return _scalar(name, value.item())
    if isinstance(value, numbers.Real):
        return float(value)
    raise SettingError(
        f"log({{{name!r}: ...}}) got a {type(value).__name__}, which is neither a number nor a word: for images and "
        "tables there are acc.log_images and acc.log_table, for files the tracker itself, acc.get_tracker(name)"
    )


# -- images and tables -------------------------------------------------------------------------------------------------

CHANNELS = (1, 3, 4)  # grey, RGB, RGBA


def checked_images(images: Any, convert: bool = True) -> tuple[Any, str]:
    """One image or several of one size as a uint8 array of shape NHWC, and how their values were changed, or "".

    Without `convert`, shapes and dtypes are checked only, and nothing waits for a device.
    """
    is_list = isinstance(images, (list, tuple))
    batch = images if is_list else [images]
    arrays: list[Any] = [image if isinstance(image, Tensor) else np.asarray(image) for image in batch]
    shapes = {tuple(array.shape) for array in arrays}
    dtypes = {str(array.dtype).removeprefix("torch.") for array in arrays}
    are_floats = all("float" in name or name == "bool" for name in dtypes)
    if len(shapes) != 1 or not (are_floats or dtypes == {"uint8"}):
        problem = f"of shapes {sorted(shapes)} and dtypes {sorted(dtypes)}" if arrays else "empty"
        remedy = "pass images of one size, as uint8 or floats in 0 … 1"
        raise SettingError(f"log_images() got images that are {problem}: {remedy}")
    shape = (len(arrays), *shapes.pop()) if is_list else shapes.pop()
    index, channel_axis = _axes(shape, prefers_first=isinstance(arrays[0], Tensor))
    if not convert:
        return None, ""
    for i, array in enumerate(arrays):
        if isinstance(array, Tensor):
            tensor = local(array.detach()).cpu()
            arrays[i] = tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy()
    batch = np.moveaxis((np.stack(arrays) if is_list else arrays[0])[index], channel_axis, -1)
    if not are_floats:
        return np.ascontiguousarray(batch), ""
    numbers = np.nan_to_num(batch.astype(np.float32))
    smallest, largest = numbers.min(), numbers.max()
    changes = []
    if smallest < 0 or largest > 1:
        changes.append(f"values from {smallest:.3g} to {largest:.3g} are cut to 0 … 1")
    if np.isnan(batch).any():
        changes.append("NaN becomes 0")
    return np.round(numbers.clip(0, 1) * 255).astype(np.uint8), " and ".join(changes)


def _axes(shape: tuple[int, ...], prefers_first: bool) -> tuple[Any, int]:
    """The index that makes four dimensions of `shape`, and the axis of the channels in these."""
    for axis in (-3, -1) if prefers_first else (-1, -3):
        if len(shape) in (3, 4) and shape[axis] in CHANNELS:
            return np.s_[:] if len(shape) == 4 else np.s_[None], axis
    if len(shape) in (2, 3):  # grey ones
        return np.s_[..., None] if len(shape) == 3 else np.s_[None, ..., None], -1
    raise SettingError(
        f"log_images() got an array of shape {shape}: pass NHWC or NCHW with {', '.join(map(str, CHANNELS))} channels, "
        "one image without N, or grey ones without C"
    )


def checked_table(columns: Any, rows: Any) -> tuple[list[str], list[list[Any]]]:
    """Check a table. Returns the column names, and rows of numbers, words and None. Waits for the device of tensors."""
    names = [] if isinstance(columns, str) else list(columns)
    valid = all(isinstance(name, str) and name and not name.startswith("_") for name in names)
    if not names or not valid or len({*names}) < len(names):
        remedy = "pass a list of words, each once, that do not begin with an underscore"
        raise SettingError(f"log_table(columns={columns!r}): {remedy}")
    table = [list(row) for row in rows]
    for row in table:
        if len(row) != len(names):
            raise SettingError(f"log_table() got a row of {len(row)} values for {len(names)} columns: {row!r:.200}")
    cells = [[None if value is None else _scalar(name, value) for name, value in zip(names, row)] for row in table]
    return names, [[cell.item() if isinstance(cell, Tensor) else cell for cell in row] for row in cells]


# -- numbers on their way from the device ------------------------------------------------------------------------------

Slot = tuple[Row, str, Tensor]  # a row, the name of a value in it, and the tensor that holds the value


class Transfer(NamedTuple):
    """Values of one device and dtype on their way to the host."""

    slots: list[Slot]
    host: Tensor
    event: Any  # None: they have arrived


class Pending:
    """Rows with numbers on their way from the device, in the order of logging."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._slots: list[Slot] = []
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
                self._slots.append((row, name, value.clone()))
                if value.device.type in EVENTS:
                    self._streams.add(torch.get_device_module(value.device).current_stream(value.device))

    def send(self) -> None:
        """Start the transfer of all that was added."""
        if not self._rows:
            return
        groups: dict[tuple[torch.device, torch.dtype, torch.Size], list[Slot]] = {}
        for slot in self._slots:
            groups.setdefault((slot[2].device, slot[2].dtype, slot[2].shape), []).append(slot)
        transfers = [self._transfer(device, group) for (device, _, _), group in groups.items()]
        self._sent.append((self._rows, transfers))
        self._rows, self._slots, self._streams = [], [], set()

    def _transfer(self, device: torch.device, group: list[Slot]) -> Transfer:
        tensors = torch.stack([tensor for _, _, tensor in group])
        if device.type not in EVENTS:
            return Transfer(group, tensors.cpu(), None)
        module = torch.get_device_module(device)
        with module.device(device):
            current_stream = module.current_stream(device)
            for stream in self._streams:
                if stream.device == device and stream != current_stream:
                    current_stream.wait_stream(stream)
            host = torch.empty(tensors.shape, dtype=tensors.dtype, pin_memory=True)
            host.copy_(tensors, non_blocking=True)
            event = module.Event()
            event.record(current_stream)
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
                for (row, name, _), number in zip(transfer.slots, transfer.host.tolist()):
                    row.values[name] = number
            rows += sent
            self._sent.popleft()
        return rows


# -- hyperparameters ---------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """`value` as dicts, lists, numbers, words and None; anything else as its `str`. For JSON: see `finite`."""
    if value is None:
        return None
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
            return finite(kind(value))
    return finite(value.item()) if isinstance(value, Tensor) and value.ndim == 0 else str(value)


def finite(value: Any) -> Any:
    """Numbers that are not finite as the words "NaN", "Infinity" and "-Infinity"; other values as they are."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return value


def concise(config: Mapping[str, Any]) -> dict[str, Any]:
    """A run's plain config in one level, with the plan's values and the machine's names only."""
    facts = config[FACTS]
    plan = {
        name: value["value"] if isinstance(value, dict) else value
        for name, value in facts["plan"].items()
        if not isinstance(value, list)  # of candidates
    }
    devices = Counter(device["name"] for device in facts["machine"]["devices"])
    device_text = ", ".join(f"{count} × {name}" for name, count in devices.items())
    machine = {"cpu": facts["machine"]["cpu"]["name"], "devices": device_text}
    return flat({**config, FACTS: {"version": facts["version"], "plan": plan, "machine": machine}})
