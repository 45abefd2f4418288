"""The files of a comparison: JSON for programs, and with matplotlib and jinja2 a page and a picture for people.

The page is one HTML file without scripts or links; its plots are an image inside it.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.units import size
from ...base.units import unit as unit_of
from ..curves import NOISY, Line, Panel, colour, curves, dashes, draw, missing, smoothed
from .runs import Record
from .summary import heads, rate, rows, seconds, unit
from .verdict import Comparison, is_busy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NEEDED = ("matplotlib", "jinja2")
TEMPLATE = Path(__file__).with_name("page.html.jinja")
LONG = 60  # letters of plans' names, above which a title counts them


def as_json(found: Comparison) -> dict[str, Any]:
    """Everything, in JSON's own types; numbers that are not finite are None."""
    plans = []
    for summary in found.summaries:
        runs = [
            {
                "number": run.number,
                "seed": run.seed,
                "command": found.task.command(run.variant),
                **dataclasses.asdict(run.end),
                "record": run.record,
            }
            for run in summary.runs
        ]
        plans.append(
            {
                "name": summary.name,
                "settings": summary.variant.settings,
                "processes": summary.variant.processes,
                "seconds": summary.seconds,
                "speed": summary.speed,
                "peak_bytes": summary.peak,
                "seconds_before": summary.before,
                "metrics": {metric.name: summary.final(metric) for metric in found.metrics},
                "runs": runs,
            }
        )
    facts = {
        "script": found.task.script,
        "arguments": found.task.arguments,
        "verdict": found.verdict,
        "metrics": found.metrics,
        "machine": found.machine,
        "plans": plans,
        "interrupted": found.interrupted,
    }
    return _plain(facts)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(name): _plain(held) for name, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(held) for held in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(found: Comparison) -> tuple[list[Path], str]:
    """Write ``compare.json``, ``compare.html`` and ``compare.png`` to the folder.

    Returns:
        The files, and a sentence that names a package missing for the page and the picture, or "".
    """
    path = found.folder / "compare.json"
    path.write_text(json.dumps(as_json(found), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if absent := missing(*NEEDED):
        return [path], f"No page and no picture: {absent}"
    page, picture = found.folder / "compare.html", found.folder / "compare.png"
    made = list(panels(found))
    page.write_text(_page(found, made), encoding="utf-8")
    if made:
        picture.write_bytes(draw(made, 2, "png", found.verdict.sentence))
    return [path, page, *[picture] * bool(made)], ""


# -- plots -------------------------------------------------------------------------------------------------------------


def panels(found: Comparison) -> Iterator[Panel]:
    """The plots that have something to show, in their order."""
    names = [summary.name for summary in found.summaries]
    for metric in found.metrics[:2]:
        for key, where, axis in ((0, "update", "optimizer updates"), (1, "time", "seconds")):
            lines = _lines(
                found, lambda r, m=metric, k=key: [(p[k], p.value) for p in r.curves.get(m.name, ())]
            )
            if lines:
                yield f"{metric.name} against {where}", curves(lines, names, axis, share=metric.share)
    records = [record for summary in found.summaries for record in summary.records]
    name, bytes_ = unit_of(max((record.peak for record in records), default=1))
    if lines := _lines(found, lambda record: [(at, count / bytes_) for at, count in record.memory]):
        device = any(record.device_memory for record in records)
        title = "memory allocated over time" if device else "memory of the process over time"
        yield f"{title}, {name}", curves(lines, names, "seconds from the first update", from_zero=True)
    if any(summary.speed for summary in found.summaries):
        yield f"throughput, {unit(found.summaries)} a second", partial(_bars, found)


def _lines(found: Comparison, read: Callable[[Record], list[tuple[float, float]]]) -> list[Line]:
    """The lines of each run, that of the typical one of a plan last, on top."""
    lines: list[Line] = []
    for index, summary in enumerate(found.summaries):
        for run in sorted(summary.runs, key=lambda run: run is summary.typical):
            points = [
                pair for pair in (read(run.record) if run.record else []) if all(map(math.isfinite, pair))
            ]
            lines += smoothed(index, points, run is summary.typical)
    return lines


def _bars(found: Comparison, axes: Axes) -> None:
    speeds = [(plan, s.name, s.speed) for plan, s in enumerate(found.summaries) if s.speed is not None]
    for place, (plan, name, speed) in enumerate(speeds):
        spread = [[speed.median - speed.least], [speed.most - speed.median]]
        axes.barh(place, speed.median, height=0.42, color=colour(plan), xerr=spread)
        axes.text(0, place - 0.25, f"{name}: {rate(speed.median)}", va="bottom", ha="left")
    axes.set_ylim(len(speeds) - 0.6, -0.85)
    axes.set_yticks([])


def _page(found: Comparison, made: Sequence[Panel]) -> str:
    """HTML. Words from outside (names, messages, arguments) are escaped."""
    from jinja2 import Environment, StrictUndefined

    task, threads = found.task, found.machine.get("threads")
    runs = [run for summary in found.summaries for run in summary.runs]
    names = ", ".join(summary.name for summary in found.summaries)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "seconds": seconds,
        "size": size,
        "count": lambda n: "–" if n is None else f"{n:,}",
    }
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        found=found,
        title=f"{Path(task.script).name}: {names if len(names) <= LONG else f'{len(found.summaries)} plans'}",
        command=shlex.join(["python", *["-m"] * task.module, task.script, *task.arguments]),
        when=time.strftime("%-d %B %Y, %H:%M", time.localtime(min(run.end.started for run in runs))),
        heads=heads(found.summaries, found.metrics),
        rows=list(zip(found.summaries, rows(found.summaries, found.metrics))),
        unit=unit(found.summaries),
        plots=", ".join(title for title, _ in made),
        images=[base64.b64encode(draw(made, columns, "svg")).decode() for columns in (1, 2)] if made else [],
        noisy=any(len(points) > NOISY for run in runs if run.record for points in run.record.curves.values()),
        busy=lambda run: is_busy(run.end.others, threads),
        colour=colour,
        dashes=dashes,
    )
