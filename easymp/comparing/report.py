"""The files of a comparison: JSON for programs, and with matplotlib and jinja2 a page and a picture for people."""

from __future__ import annotations

import dataclasses
import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .comparison import Comparison
from .page import page
from .plots import write_png
from .running import command
from .summaries import Run

NEEDED = ("matplotlib", "jinja2")


def as_json(found: Comparison) -> dict[str, Any]:
    """Everything, in JSON's own types; numbers that are not finite are None."""
    return _plain(
        {
            "script": found.task.script,
            "arguments": list(found.task.arguments),
            "verdict": dataclasses.asdict(found.verdict),
            "metrics": [dataclasses.asdict(metric) for metric in found.metrics],
            "machine": found.machine,
            "plans": [
                {
                    "name": summary.name,
                    "settings": dict(summary.variant.settings),
                    "processes": summary.variant.processes,
                    "seconds": _spread(summary.seconds),
                    "speed": _spread(summary.speed),
                    "peak_bytes": _spread(summary.peak),
                    "seconds_before": _spread(summary.before),
                    "metrics": {metric.name: _spread(summary.final(metric)) for metric in found.metrics},
                    "runs": [_run(found, run) for run in summary.runs],
                }
                for summary in found.summaries
            ],
            "interrupted": found.interrupted,
        }
    )


def write_json(found: Comparison) -> Path:
    """``compare.json`` in the comparison's folder."""
    path = found.folder / "compare.json"
    path.write_text(json.dumps(as_json(found), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path


def write_report(found: Comparison, written: list[Path]) -> str:
    """``compare.html`` and ``compare.png``, added to `written`; or a sentence that says what to install, and "" where that is done."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        are = "are" if missing[1:] else "is"
        return f"No page and no picture: {' and '.join(missing)} {are} not installed. pip install 'easymp[report]' brings what they need."
    path = found.folder / "compare.html"
    path.write_text(page(found), encoding="utf-8")
    written.append(path)
    if write_png(found, found.folder / "compare.png"):
        written.append(found.folder / "compare.png")
    return ""


def _run(found: Comparison, run: Run) -> dict[str, Any]:
    end = dataclasses.asdict(run.end)
    record = (
        None
        if run.record is None
        else {f.name: getattr(run.record, f.name) for f in dataclasses.fields(run.record)}
    )
    return {
        "number": run.number,
        "seed": run.seed,
        "command": command(found.task, run.variant),
        **end,
        "record": record,
    }


def _spread(spread: Any) -> dict[str, Any] | None:
    return None if spread is None else dataclasses.asdict(spread)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(held) for name, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(held) for held in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
