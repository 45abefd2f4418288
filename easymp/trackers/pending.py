"""Rows whose numbers are still on their way from the device: `log` copies them there and waits for nothing.

A tensor on an accelerator is copied on the device at once, for it may change in place afterwards. Once in a while all those copies go
to pinned memory of the host in one transfer, and an event tells when it has arrived. On devices without events (Apple's) that
transfer waits for the device.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from .rows import Row

HOST = "cpu"
EVENTS = ("cuda", "xpu")  # devices whose transfers to pinned memory go on while the host does


class Transfer:
    """Rows that were sent to the host together."""

    def __init__(self, rows: list[Row], places: list[tuple[Row, str, Tensor]], streams: set[Any]) -> None:
        self.rows = rows
        self._events: list[Any] = []
        self._arriving: list[tuple[list[tuple[Row, str, Tensor]], Tensor]] = []
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[Row, str, Tensor]]] = {}
        for place in places:
            groups.setdefault((place[2].device, place[2].dtype), []).append(place)
        for (device, dtype), group in groups.items():
            if device.type not in EVENTS:
                self._arriving.append((group, torch.stack([tensor for _, _, tensor in group]).cpu()))
                continue
            module = torch.get_device_module(device)
            with module.device(device):
                here = module.current_stream(device)
                for stream in streams:
                    if stream.device == device and stream != here:
                        here.wait_stream(stream)
                host = torch.empty(len(group), dtype=dtype, pin_memory=True)
                host.copy_(torch.stack([tensor for _, _, tensor in group]), non_blocking=True)
                event = module.Event()
                event.record(here)
            self._events.append(event)
            self._arriving.append((group, host))

    def arrived(self, wait: bool) -> bool:
        """Whether the numbers are here; they are put into the rows then."""
        if wait:
            for event in self._events:
                event.synchronize()
        elif not all(event.query() for event in self._events):
            return False
        for group, numbers in self._arriving:
            for (row, name, _), number in zip(group, numbers.tolist()):
                row.values[name] = number
        self._events, self._arriving = [], []
        return True


class Pending:
    """Rows in the order in which they were logged."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._places: list[tuple[Row, str, Tensor]] = []
        self._streams: set[Any] = set()
        self._transfers: deque[Transfer] = deque()

    def __len__(self) -> int:
        """Rows that have not been sent."""
        return len(self._rows)

    def __bool__(self) -> bool:
        return bool(self._rows or self._transfers)

    def add(self, row: Row) -> None:
        self._rows.append(row)
        for name, value in row.values.items():
            if isinstance(value, Tensor):
                if value.device.type == HOST:
                    row.values[name] = value.item()
                else:
                    self._keep(row, name, value)

    def _keep(self, row: Row, name: str, value: Tensor) -> None:
        copy = value.clone()
        self._places.append((row, name, copy))
        if value.device.type in EVENTS:
            self._streams.add(torch.get_device_module(value.device).current_stream(value.device))

    def send(self) -> None:
        """What has been added goes to the host; nothing waits where the device has events."""
        if self._rows:
            self._transfers.append(Transfer(self._rows, self._places, self._streams))
            self._rows, self._places, self._streams = [], [], set()

    def arrived(self, wait: bool = False) -> list[Row]:
        """The rows whose numbers are here, which leave; with `wait` all that were sent."""
        rows: list[Row] = []
        while self._transfers and self._transfers[0].arrived(wait):
            rows += self._transfers.popleft().rows
        return rows
