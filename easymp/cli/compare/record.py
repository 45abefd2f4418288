"""The record that the ranks of one run wrote (`easymp.trackers.recorder`), read into curves and totals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class Point(NamedTuple):
    """A logged value."""

    update: int  # updates made by then
    seconds: float  # since the end of the first update; negative before it
    value: float


@dataclass(frozen=True)
class Record:
    """One training, as its ranks recorded it.

    Attributes:
        begun: seconds since the epoch, when the Accelerator was made.
        first: seconds from there to the end of the first update; None where there was none.
        seconds: from the end of the first update to that of the last; None for fewer than two updates.
        updates, samples: between the two; samples of all ranks, None where they are unknown.
        peak: bytes of the rank that had most, and `memory` that rank's bytes over the seconds since the first update.
        device_memory: whether those are allocated on the device, or resident in the process.
        curves: logged values by name.
        plan, machine: as last told.
        trainings: how many Accelerators the script made; this is the one with the most updates.
    """

    begun: float
    first: float | None
    seconds: float | None
    updates: int
    samples: int | None
    peak: int
    device_memory: bool
    memory: list[tuple[float, int]]
    curves: dict[str, list[Point]]
    plan: dict[str, Any]
    machine: dict[str, Any]
    trainings: int = 1


@dataclass
class _Training:
    """The lines from one ``begin`` to the next, by event."""

    begin: dict[str, Any]
    lines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def last(self, event: str, key: str, default: Any = None) -> Any:
        found = self.lines.get(event)
        return found[-1].get(key, default) if found else default

    @property
    def updates(self) -> int:
        return max(int(self.last(event, "updates", 0)) for event in ("first", "memory", "end"))

    @property
    def peak(self) -> int:
        return max(
            int(self.last("end", "peak", 0)), *(line["bytes"] for line in self.lines.get("memory", ())), 0
        )


def read(folder: Path) -> Record | None:
    """The record in `folder`; None where no Accelerator was made. Lines that a killed run cut short are left out."""
    ranks = [list(_trainings(path)) for path in sorted(folder.glob("rank-*.jsonl"))]
    main = next((found for found in ranks if found and found[0].begin.get("rank") == 0), None)
    if main is None:
        return None
    chosen = max(range(len(main)), key=lambda i: main[i].updates)
    one = main[chosen]
    fullest = max(
        (found[chosen] for found in ranks if len(found) > chosen), key=lambda training: training.peak
    )
    first = one.last("first", "at")
    zero = first or 0.0
    curves: dict[str, list[Point]] = {}
    for line in one.lines.get("log", ()):
        for name, value in line["values"].items():
            point = Point(int(line["updates"]), round(line["at"] - zero, 4), float(value))
            curves.setdefault(name, []).append(point)
    return Record(
        begun=float(one.begin["time"]),
        first=first,
        seconds=_seconds(one, zero),
        updates=max(0, one.updates - 1),
        samples=_samples(one),
        peak=fullest.peak,
        device_memory=one.begin.get("memory") == "device",
        memory=[
            (round(line["at"] - zero, 3), int(line["bytes"])) for line in fullest.lines.get("memory", ())
        ],
        curves=curves,
        plan=dict(one.last("end", "plan") or one.begin.get("plan", {})),
        machine=dict(one.begin.get("machine", {})),
        trainings=len(main),
    )


def _trainings(path: Path) -> Iterator[_Training]:
    running: _Training | None = None
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if line["event"] == "begin":
            if running is not None:
                yield running
            running = _Training(line)
        elif running is not None:
            running.lines.setdefault(line["event"], []).append(line)
    if running is not None:
        yield running


def _seconds(one: _Training, zero: float) -> float | None:
    if one.updates < 2:
        return None
    exact = one.last("end", "seconds")
    return float(exact) if exact is not None else float(one.last("memory", "at", zero)) - zero


def _samples(one: _Training) -> int | None:
    """Samples read between the first update and the last; None where there were none, as with several updates of one batch."""
    last = one.last("end" if "end" in one.lines else "memory", "samples")
    first = one.last("first", "samples")
    return None if last is None or first is None else int(last) - int(first) or None
