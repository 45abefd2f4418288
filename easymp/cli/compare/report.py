"""A comparison for readers: its table, JSON for programs, and with matplotlib and jinja2 a page and a picture.

The page is one HTML file without scripts or links; its plots are images inside it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...base.units import duration, rate, size
from ...base.units import unit as unit_of
from ...settings import OVERRIDE
from ..curves import NOISY, OUTLIER, Line, Panel, colour, curves, draw, logarithmic, missing, page, smoothed
from .runs import Record
from .summary import Summary, middle
from .verdict import Comparison, is_busy, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NEEDED = ("matplotlib", "jinja2")
SHOWN = ("mixed_precision", "strategy", "gradient_accumulation_steps")  # a decision of the plan shows them
OUTSIDE = "set from outside"
ALIKE = 1.05  # the largest median as a multiple of the smallest, up to which a column has nothing to tell


# -- the table ---------------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """A head, and for each plan a text and the range of its runs, or ""."""

    head: str
    cells: list[tuple[str, str]]


def columns(found: Comparison) -> tuple[list[Column], str]:
    """The columns in which the plans differ, and a sentence about those in which they do not."""
    plans, standings = found.summaries, found.verdict.standings
    times = Column("time", [_cell(plan.seconds, duration) for plan in plans])
    speeds = Column(f"{plans[0].unit}/s", [_cell(plan.speeds, rate) for plan in plans])
    long = len({count for plan in plans for count in plan.counts}) > 1
    memory = Column("memory", [(_cell(plan.peaks, size)[0], "") for plan in plans])
    before = Column("start-up", [(_cell(plan.before, duration)[0], "") for plan in plans])
    shown = [speeds if long else times]
    if found.verdict.take:
        ratios = [
            (ratio(s.ratio), " … ".join(map(ratio, s.interval or ()))) if s.ratio else ("–", "")
            for s in standings
        ]
        shown.append(Column("ratio", ratios))
    results = [Column(m.name, [_cell(plan.finals(m), m.text) for plan in plans]) for m in found.metrics]
    if any(standing.result for standing in standings):
        results.append(Column("result", [(standing.result or "–", "") for standing in standings]))
    same = []
    for column, values in (
        (memory, [plan.peaks for plan in plans]),
        *((column, []) for column in results),
        (before, [plan.before for plan in plans]),
    ):
        known = [middle(value) for value in values if value]
        texts = [text for text, _ in column.cells if text != "–"]
        alike = _alike(known) or len({cell for cell in column.cells if cell[0] in texts}) == 1
        if alike and len(texts) > 1:
            same.append(f"{column.head} {'about ' * (len(set(texts)) > 1)}{texts[0]}")
        elif texts:
            shown.append(column)
    return shown, f"The same for all that finished: {', '.join(same)}." if same else ""


def _alike(values: Sequence[float]) -> bool:
    return len(values) > 1 and max(values) <= ALIKE * min(values)


def _cell(values: Sequence[float], say: Callable[[float], str]) -> tuple[str, str]:
    if not values:
        return "–", ""
    least, most = say(min(values)), say(max(values))
    return say(middle(values)), f"{least} … {most}" if least != most else ""


# -- files -------------------------------------------------------------------------------------------------------------


def as_json(found: Comparison) -> dict[str, Any]:
    """Everything, in JSON's own types; numbers that are not finite are None."""
    task = found.task
    commands = {plan.name: task.command(plan.variant) if task else [] for plan in found.summaries}
    plans = [
        {
            "name": plan.name,
            "settings": {**plan.variant.settings, **plan.variant.words},
            "processes": plan.variant.processes,
            "seconds": _spread(plan.seconds),
            "speed": _spread(plan.speeds),
            "peak_bytes": _spread(plan.peaks),
            "seconds_before": _spread(plan.before),
            "metrics": {metric.name: _spread(plan.finals(metric)) for metric in found.metrics},
            "runs": [
                {
                    **vars(run.end),
                    **{name: getattr(run, name) for name in ("number", "seed", "record")},
                    "command": commands[plan.name],
                }
                for run in plan.runs
            ],
        }
        for plan in found.summaries
    ]
    about = {"script": task.script if task else None, "arguments": task.arguments if task else []}
    kept = ("verdict", "metrics", "machine", "interrupted")
    return _plain({**about, **{name: getattr(found, name) for name in kept}, "plans": plans})


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    numbers = (len(values), middle(values), min(values), max(values)) if values else ()
    return dict(zip(("count", "median", "least", "most"), numbers)) or None


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        value = vars(value)
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
    html, picture = found.folder / "compare.html", found.folder / "compare.png"
    made = list(panels(found))
    html.write_text(_page(found, made), encoding="utf-8")
    if made:
        picture.write_bytes(draw(made, 2, "png", found.verdict.sentence))
    return [path, html, *[picture] * bool(made)], ""


# -- plots -------------------------------------------------------------------------------------------------------------


def panels(found: Comparison) -> Iterator[Panel]:
    """The plots that have something to show, in their order."""
    plans, drawn = found.summaries, partial(curves, names=[plan.name for plan in found.summaries])
    if any(plan.speeds for plan in plans):
        yield f"Speed, {plans[0].unit} a second", partial(_speeds, plans)
    axes = ((0, "updates", "optimizer updates"), (1, "seconds", "seconds from the first update"))
    for metric, (key, by, across) in product(found.metrics[:2], axes):
        lines = _lines(plans, lambda r, m=metric, k=key: [(p[k], p.value) for p in r.curves.get(m.name, ())])
        if lines:
            fill = partial(drawn, lines=lines, across=across, up=metric.name, share=metric.share)
            yield f"{metric.name} by {by}", fill
    peaks = [max(plan.peaks) for plan in plans if plan.peaks]
    name, bytes_ = unit_of(max(peaks, default=1))
    lines = _lines(plans, lambda record: [(at, count / bytes_) for at, count in record.memory])
    if lines and not _alike(peaks):
        device = any(record.device_memory for plan in plans for record in plan.records)
        title = "Memory allocated on the device" if device else "Memory of the process"
        yield title, partial(drawn, lines=lines, across=axes[1][2], up=f"memory, {name}", from_zero=True)


def _lines(plans: Sequence[Summary], read: Callable[[Record], list[tuple[float, float]]]) -> list[Line]:
    """The lines of each run, that of the typical one of a plan last, on top."""
    lines: list[Line] = []
    for index, plan in enumerate(plans):
        typical = plan.typical
        for run in sorted(plan.runs, key=lambda run: run is typical):
            lines += smoothed(index, read(run.record) if run.record else [], run is typical)
    return lines


def _speeds(plans: Sequence[Summary], axes: Axes) -> None:
    """A dot for each plan's median, a bar from its slowest to its fastest run."""
    known = [(i, plan) for i, plan in enumerate(plans) if plan.speeds]
    outlier = max(plan.speed for _, plan in known) > OUTLIER * min(plan.speed for _, plan in known)
    if outlier:
        logarithmic(axes, "x", (1, 2, 5))
    else:
        axes.set_xlim(0, 1.05 * max(max(plan.speeds) for _, plan in known))
    for row, (index, plan) in enumerate(known):
        wide = [[plan.speed - min(plan.speeds)], [max(plan.speeds) - plan.speed]]
        axes.errorbar(plan.speed, row, xerr=wide, fmt="o", color=colour(index), capsize=4, markersize=8)
        words = f"{plan.name}: {rate(plan.speed)}"
        axes.text(0.02, row - 0.2, words, transform=axes.get_yaxis_transform(), va="bottom")
    axes.set_xlabel(f"{plans[0].unit} a second{', logarithmic' * outlier}")
    axes.set_ylim(len(known) - 0.5, -0.7)
    axes.set_yticks([])


def _page(found: Comparison, made: Sequence[Panel]) -> str:
    task, threads = found.task, found.machine.get("threads")
    runs = [run for summary in found.summaries for run in summary.runs]
    shown, same = columns(found)
    choices, alike = _choices(found.summaries)
    return page(
        "compare/page.html.jinja",
        made,
        title=found.verdict.sentence,
        found=found,
        command=shlex.join(["python", *["-m"] * task.module, task.script, *task.arguments]) if task else "",
        when=time.strftime("%-d %B %Y, %H:%M", time.localtime(min(run.end.started for run in runs))),
        repeats=max(run.number for run in runs),
        columns=shown,
        facts=[same, *found.verdict.evidence, found.missing],
        choices=choices,
        alike=alike,
        noisy=any(len(points) > NOISY for run in runs if run.record for points in run.record.curves.values()),
        busy=lambda run: is_busy(run.end.others, threads),
        seconds=duration,
        size=lambda number: "–" if number is None else size(number),
        count=lambda number: "–" if number is None else f"{number:,}",
    )


def _choices(plans: Sequence[Summary]) -> tuple[list[tuple[str, list[Any]]], list[tuple[str, Any]]]:
    """Decisions by name, as value and reason: those in which plans differ, with one for each plan, and the others."""
    made: list[dict[str, tuple[Any, str]]] = []
    for plan in plans:
        said = plan.typical.record.plan if plan.typical and plan.typical.record else {}
        words = {n: one if isinstance(one, dict) else {"value": one, "reason": ""} for n, one in said.items()}
        made.append(
            {n: (w["value"], OUTSIDE if OVERRIDE in w["reason"] else w["reason"]) for n, w in words.items()}
        )
        outside = {**plan.variant.settings, **plan.variant.words}
        made[-1] |= {name: (value, OUTSIDE) for name, value in outside.items() if name not in SHOWN}
    differ, alike = [], []
    for name in dict.fromkeys(name for said in made for name in said):
        row = [said.get(name) for said in made]
        if len({str(one and one[0]) for one, said in zip(row, made) if said}) > 1:
            differ.append((name, row))
        else:
            alike.append((name, next(filter(None, row))))
    return differ, alike
