"""The files of a comparison: JSON for programs, and with matplotlib and jinja2 a page and a picture for people.

The page is one HTML file without scripts or links; its plots are an image inside it. Colours are Okabe and Ito's, which any kind of
colour vision can tell apart (Okabe, Ito: Color Universal Design, 2008), and each plan has its own dashes, too.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import math
import shlex
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...base.units import size
from ...base.units import unit as unit_of
from .runs import Record
from .summary import Metric, heads, rate, rows, seconds, unit
from .verdict import Comparison, is_busy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NEEDED = ("matplotlib", "jinja2")
TEMPLATE = Path(__file__).with_name("page.html.jinja")
LONG = 60  # letters of plans' names, above which a title counts them
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES = ("", "8 4", "2 2", "8 3 2 3", "5 2 2 2 2 2", "12 4")  # as SVG has them
NOISY = 60  # logged values from which on they are those of single batches, which scatter
PARTS = 25  # of a noisy curve; a running mean goes over each
WIDTH, HEIGHT = 4.7, 3.2  # inches of a plot
STYLE = {
    "text.parse_math": False,  # a plan's or a metric's name is not a formula
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#c9ced6",
    "path.simplify_threshold": 0.5,
}


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
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        are = "are" if missing[1:] else "is"
        needed = "pip install 'easymp[report]' brings them"
        return [path], f"No page and no picture: {' and '.join(missing)} {are} not installed. {needed}."
    page, picture = found.folder / "compare.html", found.folder / "compare.png"
    made = list(panels(found))
    page.write_text(_page(found, made), encoding="utf-8")
    if made:
        picture.write_bytes(draw(made, 2, "png", found.verdict.sentence))
    return [path, page, *[picture] * bool(made)], ""


# -- plots -------------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """One curve of a plan; `main` is the typical run, other curves are drawn faintly."""

    plan: int
    points: list[tuple[float, float]]
    main: bool


Panel = tuple[str, Callable[["Axes"], None]]  # a title, and a function that draws


def panels(found: Comparison) -> Iterator[Panel]:
    """The plots that have something to show, in their order."""
    for metric in found.metrics[:2]:
        for key, where, axis in ((0, "update", "optimizer updates"), (1, "time", "seconds")):
            lines = _lines(
                found, lambda r, m=metric, k=key: [(p[k], p.value) for p in r.curves.get(m.name, ())]
            )
            if lines:
                yield f"{metric.name} against {where}", partial(_curves, found, lines, axis, metric)
    records = [record for summary in found.summaries for record in summary.records]
    name, bytes_ = unit_of(max((record.peak for record in records), default=1))
    if lines := _lines(found, lambda record: [(at, count / bytes_) for at, count in record.memory]):
        device = any(record.device_memory for record in records)
        title = "memory allocated over time" if device else "memory of the process over time"
        yield f"{title}, {name}", partial(_curves, found, lines, "seconds from the first update", None)
    if any(summary.speed for summary in found.summaries):
        yield f"throughput, {unit(found.summaries)} a second", partial(_bars, found)


def _lines(found: Comparison, read: Callable[[Record], list[tuple[float, float]]]) -> list[Line]:
    """A line a run; a noisy one becomes its running mean, with the values of the main one behind it."""
    lines = []
    for index, summary in enumerate(found.summaries):
        for run in sorted(summary.runs, key=lambda run: run is summary.typical):  # the main one last, on top
            points = [
                pair for pair in (read(run.record) if run.record else []) if all(map(math.isfinite, pair))
            ]
            main = run is summary.typical
            if len(points) > NOISY:
                lines += [Line(index, points, False)] * main
                points = running_mean(points)
            lines += [Line(index, points, main)] * bool(points)
    return lines


def running_mean(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Each value the mean of those around it: of one part in `PARTS` of all, fewer at the ends, as many on either side."""
    half = max(1, len(points) // (2 * PARTS))
    sums = [0.0, *accumulate(value for _, value in points)]
    means = []
    for i, (x, _) in enumerate(points):
        reach = min(half, i, len(points) - 1 - i)
        means.append((x, (sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1)))
    return means


def _curves(found: Comparison, lines: Sequence[Line], axis: str, metric: Metric | None, axes: Axes) -> None:
    values = [value for line in lines for _, value in line.points]
    if metric is None:
        axes.set_ylim(0, 1.05 * max(values))
    elif metric.share and all(0 <= value <= 1 for value in values):
        axes.yaxis.set_major_formatter(lambda value, _: f"{value * 100:g}%")
    elif min(values) > 0 and max(values) > 30 * min(values):  # equal steps would hide the small ones
        axes.set_yscale("log")
    for line in lines:
        pattern = tuple(float(length) for length in dashes(line.plan).split())
        axes.plot(
            *zip(*line.points),
            color=colour(line.plan),
            linestyle=(0, pattern) if pattern and line.main else "-",
            linewidth=1.8 if line.main else 0.9,
            alpha=1 if line.main else 0.3,
            marker="o" if len(line.points) == 1 else None,
            label=found.summaries[line.plan].name if line.main else None,
        )
    axes.set_xlabel(axis)
    axes.legend(fontsize="small")


def _bars(found: Comparison, axes: Axes) -> None:
    speeds = [(plan, s.name, s.speed) for plan, s in enumerate(found.summaries) if s.speed is not None]
    for place, (plan, name, speed) in enumerate(speeds):
        spread = [[speed.median - speed.least], [speed.most - speed.median]]
        axes.barh(place, speed.median, height=0.42, color=colour(plan), xerr=spread)
        axes.text(0, place - 0.25, f"{name}: {rate(speed.median)}", va="bottom", ha="left")
    axes.set_ylim(len(speeds) - 0.6, -0.85)
    axes.set_yticks([])


def draw(made: Sequence[Panel], columns: int, form: str, head: str = "") -> bytes:
    """All plots in one image, as ``"svg"`` or ``"png"``, under `head`."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        lines = -(-len(made) // columns)
        height = lines * HEIGHT + (0.8 if head else 0)
        figure, file = Figure(figsize=(columns * WIDTH, height), layout="constrained"), io.BytesIO()
        if head:
            figure.suptitle(textwrap.fill(head, 100), fontsize=11, x=0.02, ha="left")
        for place, (title, fill) in enumerate(made, 1):
            axes = figure.add_subplot(lines, columns, place)
            axes.set_title(title, loc="left", fontsize=11)
            fill(axes)
        figure.savefig(file, format=form, dpi=150, metadata={"Date" if form == "svg" else "Software": None})
    return file.getvalue()


def colour(plan: int) -> str:
    return COLOURS[plan % len(COLOURS)]


def dashes(plan: int) -> str:
    """A plan's dashes: each pair of them and a colour occurs once, for as many plans as there are pairs."""
    return DASHES[(plan + plan // len(COLOURS)) % len(DASHES)]


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
