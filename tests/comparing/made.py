"""Runs as they could have been, without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from easymp.comparing.comparison import Comparison, conclude
from easymp.comparing.records import Point, Record
from easymp.comparing.running import FAILURE, FINISHED, End, Task
from easymp.comparing.summaries import Run
from easymp.comparing.variants import Variant

MACHINE: dict[str, Any] = {
    "processor": "Some Xeon",
    "cores": 32,
    "threads": 64,
    "memory": 256 << 30,
    "devices": [{"name": "H100", "memory": 80 << 30, "architecture": "sm_90"}] * 2,
    "links": "NVLink",
    "system": "Linux",
    "python": "3.11",
    "torch": "2.13.0",
    "easymp": "0.1.0",
}


def run(
    variant: Variant,
    seconds: float | None,
    number: int = 1,
    *,
    values: dict[str, list[float]] | None = None,
    others: float | None = 0.0,
    samples: int | None = 1000,
    updates: int = 100,
    peak: int = 1 << 30,
    why: str = "",
    status: str = FAILURE,
) -> Run:
    """A run that took `seconds` from the first update to the last; one that failed where there are none."""
    if seconds is None:
        return Run(variant, number, None, End(status, why, 1e9, 3.0, others), None)
    curves = {
        name: [
            Point(i * updates // len(held), seconds * i / len(held), value) for i, value in enumerate(held, 1)
        ]
        for name, held in (values or {}).items()
    }
    record = Record(
        begun=1e9 + 2.0,
        first=1.0,
        seconds=seconds,
        updates=updates,
        samples=samples,
        peak=peak,
        device_memory=True,
        memory=[(-0.5, peak // 2), (0.0, peak), (seconds, peak)],
        curves=curves,
        plan={
            "processes": 1,
            "precision": {"value": variant.name, "reason": "asked for", "source": "asked for"},
        },
        machine=MACHINE,
    )
    return Run(variant, number, None, End(FINISHED, "", 1e9, seconds + 4.0, others), record)


def comparison(
    *runs: Run, folder: Path = Path("nowhere"), metrics: tuple[str, ...] = (), script: str = "train.py"
) -> Comparison:
    variants = list({id(run.variant): run.variant for run in runs}.values())
    repeats = max(run.number for run in runs)
    return conclude(Task(script, ["--lr", "0.1"]), variants, runs, folder, repeats=repeats, metrics=metrics)
