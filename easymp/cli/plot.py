"""Draw the curves of runs from their JSON lines: finished ones, or as far as a running one has come.

RUN is a file of rows (log.jsonl), or a folder: all runs below it are drawn, each with the name of its folder. The rows
are those of acc.log, under log_with="jsonl", which is the default.

examples:
  easymp plot runs/one
  easymp plot runs/one runs/two --metric loss --metric 'val/*'
  easymp plot runs --x time --output curves.png

The table of the last values is always printed. The picture needs matplotlib: pip install 'easymp[report]'.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import SettingError, nearest
from .terminal import missing_packages, table, wrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOISY = 60  # points from which on a curve has values of single batches, which scatter
WINDOWS = 25  # of a running mean in a noisy curve
WIDTH, HEIGHT = 4.7, 3.2  # inches of a panel
LOG_RATIO = 30  # of the largest to the smallest value, from which on the axis is logarithmic
LINE_STYLES = ("-", "--", ":", "-.")  # one for each round of the style's colours
# The colours of matplotlib's style can be told apart by any kind of colour vision.
STYLE: Any = [
    "tableau-colorblind10",
    {
        "text.parse_math": False,  # a name is not a formula
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": "#c9ced6",
        "legend.framealpha": 0,
    },
]


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="a file of rows, or a folder with some")
    metric = "draw this logged value, or those that match, as 'val/*'; may be repeated (all numbers)"
    add("--metric", action="append", default=[], metavar="NAME", help=metric)
    add("--x", choices=("step", "time"), default="step", help="the horizontal axis (step)")
    picture = "the picture to write, .png or .svg (%(default)s)"
    add("--output", type=Path, default=Path("easymp-plot.svg"), metavar="FILE", help=picture)


def run(args: argparse.Namespace) -> int:
    form = args.output.suffix.lower().removeprefix(".")
    if form not in ("png", "svg"):
        raise SettingError(f"--output {args.output}: name a file that ends with .png or .svg")
    runs = read(args.runs)
    names = choose(runs, args.metric)
    rows = [["", "rows", "step", *names], *(last_values(run, names) for run in runs)]
    print(table(rows, right=set(range(1, len(rows[0])))))
    if sentence := missing_packages("report", "matplotlib"):
        raise SettingError(f"No curves: {sentence}")
    panels = []
    for name in names:
        lines: list[Line] = []
        for series, run in enumerate(runs):
            lines += smooth(series, points_of(run.curves.get(name, ()), by_time=args.x == "time"))
        panels.append(Panel(name, lines, "step" if args.x == "step" else "seconds since the start", name))
    panels = [panel for panel in panels if panel.lines]
    if not panels:
        raise SettingError(f"No curves: of {', '.join(names)} no run has logged a finite number")
    args.output.write_bytes(draw(panels, [run.name for run in runs], form))
    print(f"\nwrote {args.output}")
    return 0


# -- runs


class Point(NamedTuple):
    """A logged value."""

    step: int
    seconds: float  # since the start of the run
    value: float


class Run(NamedTuple):
    """One file of rows."""

    name: str  # of the folder or the file, unlike those of the other runs
    rows: int
    curves: Mapping[str, list[Point]]  # by logged name


def read(paths: Sequence[Path]) -> list[Run]:
    """The runs in files and folders. A folder without runs is named on stderr, where others have some."""
    files: dict[Path, None] = {}
    problems = []
    for path in paths:
        # The tracker lists the starts of a run beside its rows.
        logs = (log for log in path.rglob("*.jsonl") if log.with_suffix(".json").is_file())
        rows = [path] if path.is_file() else sorted(logs)
        files |= dict.fromkeys(file.resolve() for file in rows)
        if not rows:
            reason = "no run has logged JSON lines below it" if path.is_dir() else "there is no such file or folder"
            problems.append(f"{path}: {reason}. Pass the file of rows (log.jsonl), or the run's folder")
    # As much of each path as tells the files apart; the folder alone stands for its log.jsonl.
    parts = [file.parent.parts if file.stem == "log" else file.with_suffix("").parts for file in files]
    depth = 1
    while depth < max(map(len, parts), default=0) and len({tuple(p[-depth:]) for p in parts}) < len(parts):
        depth += 1
    runs = [_read_run(file, "/".join(p[-depth:])) for file, p in zip(files, parts)]
    if runs and not any(run.rows for run in runs):
        problems.append(f"{next(iter(files))} has no rows of a run: pass a file that log_with='jsonl' has written")
    if not any(run.rows for run in runs):
        raise SettingError(problems[0])
    for problem in problems:
        print(wrap(problem), file=sys.stderr)
    return runs


def _read_run(file: Path, name: str) -> Run:
    rows = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):  # the last line of a running process, half written
            row = json.loads(line)
            if isinstance(row, dict) and {"_step", "_time"} <= row.keys():
                rows.append(row)
    start = math.inf
    with suppress(OSError, ValueError, LookupError, TypeError):  # no file of the tracker
        start = float(json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))["starts"][0]["time"])
    start = min([start, *(row["_time"] for row in rows[:1])])  # a tracker starts with its first rows
    curves: dict[str, list[Point]] = {}
    for row in rows:
        for key, value in row.items() if "_table" not in row else ():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not key.startswith("_") and (is_number or value in ("NaN", "Infinity", "-Infinity")):
                curves.setdefault(key, []).append(Point(row["_step"], row["_time"] - start, float(value)))
    return Run(name, len(rows), curves)


def choose(runs: Sequence[Run], patterns: Sequence[str]) -> list[str]:
    """The logged names to draw: those that match one of `patterns`, in this order; by default all."""
    logged = list(dict.fromkeys(name for run in runs for name in run.curves))
    names: dict[str, None] = {}
    for pattern in patterns or ["*"]:
        matches = [name for name in logged if name == pattern or fnmatchcase(name, pattern)]
        if not matches:
            hint = nearest(pattern, logged) or "."
            raise SettingError(f"no run has logged a number as {pattern!r}{hint} Logged: {', '.join(logged) or 'none'}")
        names |= dict.fromkeys(matches)
    return list(names)


def last_values(run: Run, names: Sequence[str]) -> list[str]:
    """A row of a table: the run's name, rows, last step, and the last value of each name."""
    step = max((curve[-1].step for curve in run.curves.values()), default=0)
    values = [f"{run.curves[name][-1].value:.4g}" if name in run.curves else "–" for name in names]
    return [run.name, f"{run.rows:,}", f"{step:,}", *values]


# -- drawing, for `easymp compare`, too


class Line(NamedTuple):
    """One line of series number `series`; the `main` one is drawn strongly and named, others faintly."""

    series: int
    points: list[tuple[float, float]]
    main: bool


class Panel(NamedTuple):
    """Lines in one pair of axes."""

    title: str
    lines: Sequence[Line]
    x_label: str
    y_label: str
    percent: bool = False  # values from 0 to 1 are shares
    from_zero: bool = False


def points_of(curve: Iterable[Point], by_time: bool) -> list[tuple[float, float]]:
    return [(point.seconds if by_time else point.step, point.value) for point in curve]


def smooth(series: int, points: list[tuple[float, float]], main: bool = True) -> Iterator[Line]:
    """The line of the finite `points`; of a noisy one its running mean, with the main one's values behind it."""
    points = [point for point in points if all(map(math.isfinite, point))]
    if len(points) > NOISY:
        if main:
            yield Line(series, points, False)
        x, values = np.array(points, dtype=float).T
        index, count = np.arange(len(x)), len(x)
        reach = np.minimum(count // (2 * WINDOWS), np.minimum(index, count - 1 - index))  # fewer at the ends
        sums = np.concatenate([[0.0], values.cumsum()])
        means = (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)
        points = list(zip(x.tolist(), means.tolist()))
    if points:
        yield Line(series, points, main)


def draw(panels: Sequence[Panel], names: Sequence[str], form: str, heading: str = "") -> bytes:
    """All panels in one image, as ``"svg"`` or ``"png"``, under a heading; `names` are those of the series."""
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context(STYLE):
        columns = min(2, len(panels))
        rows = -(-len(panels) // columns)
        height = rows * HEIGHT + (0.8 if heading else 0)
        figure, file = Figure(figsize=(columns * WIDTH, height), layout="constrained"), io.BytesIO()
        if heading:
            figure.suptitle(textwrap.fill(heading, 100), fontsize=11, x=0.02, ha="left")
        for number, panel in enumerate(panels, 1):
            _draw_panel(figure.add_subplot(rows, columns, number), panel, names)
        figure.savefig(file, format=form, dpi=150)
    return file.getvalue()


def _draw_panel(axes: Axes, panel: Panel, names: Sequence[str]) -> None:
    """Draw the lines, each main one with its name; the axis is logarithmic where values differ by `LOG_RATIO`."""
    from matplotlib.ticker import PercentFormatter

    values = [value for line in panel.lines for _, value in line.points]
    if panel.from_zero:
        axes.set_ylim(0, 1.05 * max(values))
    elif panel.percent and all(0 <= value <= 1 for value in values):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif min(values) > 0 and max(values) > LOG_RATIO * min(values):  # equal steps would hide the small ones
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    for line in panel.lines:
        colour, style = f"C{line.series}", LINE_STYLES[line.series // 10 % len(LINE_STYLES)]
        marker = "o" if len(line.points) == 1 else None
        if line.main:
            label = names[line.series]
            axes.plot(*zip(*line.points), color=colour, linestyle=style, linewidth=1.8, marker=marker, label=label)
        else:
            axes.plot(*zip(*line.points), color=colour, linewidth=0.9, alpha=0.3, marker=marker)
    axes.set_title(panel.title, loc="left", fontsize=11)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.legend(fontsize="small")
