"""Draw the curves of runs from their JSON lines: finished ones, or as far as a running one has come.

RUN is a file of rows (log.jsonl), or a folder: all runs below it are drawn, each
with the name of its folder. The rows are those of acc.log, under log_with="jsonl",
which is the default.

examples:
  easymp plot runs/one
  easymp plot runs/one runs/two --metric loss --metric 'val/*' --html curves.html
  easymp plot runs --x time --output curves.png

The table of the last values is always printed. --html writes one page without
links to other hosts, --output a picture (.png or .svg); without both the page is
easymp-plot.html. They need matplotlib and jinja2: pip install 'easymp[report]'.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..base.units import flat
from ..errors import SettingError, nearest
from .terminal import table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which any kind of colour vision can tell apart (Color Universal Design, 2008), and dashes.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES = ("", "8 4", "2 2", "8 3 2 3", "5 2 2 2 2 2", "12 4")  # as SVG has them
NOISY = 60  # points from which on a curve has values of single batches, which scatter
MOST = 2000  # points that are drawn of one curve
PARTS = 25  # of a noisy curve; a running mean goes over each
WIDTH, HEIGHT = 4.7, 3.2  # inches of a panel
LOG = 30  # ratio of the largest to the smallest value from which on the axis is logarithmic
OUTLIER = 5  # ratio of the longest to the shortest curve from which on the axis across is logarithmic
INK, GRID = "#1b1f24", "#c9ced6"  # and in an SVG, where its reader prefers a dark page:
DARK = "<style>svg{--ink:%s;--grid:%s}@media(prefers-color-scheme:dark){svg{--ink:#e8ebf0;--grid:#363d47}}</style>"
STYLE = {
    "text.parse_math": False,  # a name is not a formula
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "legend.framealpha": 0,
    "path.simplify_threshold": 0.5,
}

SPANS = ((2 * 3600, 3600, "hours"), (120, 60, "minutes"), (0, 1, "seconds"))
"""Length of the longest run from which a unit of time is used, its seconds, and its name."""


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="a file of rows, or a folder with some")
    metric = "draw this logged value, or those that match, as 'val/*'; may be repeated (all numbers)"
    add("--metric", action="append", default=[], metavar="NAME", help=metric)
    add("--x", choices=("step", "time"), default="step", help="the horizontal axis (step)")
    add("--html", type=Path, metavar="FILE", help="write a page")
    add("--output", type=Path, metavar="FILE", help="write a picture, .png or .svg")


def run(args: argparse.Namespace) -> int:
    form = args.output.suffix.lower().removeprefix(".") if args.output else "png"
    if form not in ("png", "svg"):
        raise SettingError(f"--output {args.output}: name a file that ends with .png or .svg")
    runs = read(args.runs)
    names = choose(runs, args.metric)
    print(table([["", "rows", "step", *names], *last(runs, names)], right=set(range(1, len(names) + 3))))
    if lacking := missing("matplotlib", "jinja2"):
        raise SettingError(f"No curves: {lacking}")
    html = args.html or (None if args.output else Path("easymp-plot.html"))
    made = list(panels(runs, names, args.x))
    if not made:
        raise SettingError(f"No curves: of {', '.join(names)} no run has logged a finite number")
    if html:
        write_page(runs, names, made, html)
    if args.output:
        args.output.write_bytes(draw(made, min(2, len(made)), form))
    print("\nwrote " + "\n      ".join(str(path) for path in (html, args.output) if path))
    return 0


# -- runs


class Run(NamedTuple):
    """One file of rows."""

    name: str  # of the folder or the file, unlike those of the other runs
    config: Mapping[str, Any]  # hyperparameters and settings by name, of the last start
    rows: int  # how many
    began: float  # seconds since 1970
    points: Mapping[str, list[tuple[int, float, float]]]  # by logged name: step, seconds from start, value


def read(places: Sequence[Path]) -> list[Run]:
    """The runs in files and folders."""
    files: dict[Path, None] = {}
    for place in places:
        found, why = [place], "there is no such file or folder"
        if not place.is_file():
            found = sorted(p for p in place.rglob("*.jsonl") if _about(p).is_file())
        if not found:
            why = "no run has logged JSON lines below it" if place.is_dir() else why
            raise SettingError(f"{place}: {why}. Pass the file of rows (log.jsonl), or the run's folder")
        files |= dict.fromkeys(path.resolve() for path in found)
    runs = [_read(path, name) for path, name in zip(files, _names(list(files)))]
    if not any(run.rows for run in runs):
        first = next(iter(files))
        raise SettingError(f"{first} has no rows of a run: pass a file that log_with='jsonl' has written")
    return runs


def _names(files: Sequence[Path]) -> list[str]:
    """As much of each path as tells the files apart; the folder alone stands for its ``log.jsonl``."""
    parts = [[*path.parts[:-1], *([path.stem] if path.stem != "log" else [])] for path in files]
    depth = 1
    while depth < max(map(len, parts)) and len({tuple(p[-depth:]) for p in parts}) < len(parts):
        depth += 1
    return ["/".join(p[-depth:]) for p in parts]


def _about(path: Path) -> Path:
    return path.with_name(path.name.removesuffix("l"))


def _read(path: Path, name: str) -> Run:
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # the last line of a running process, half written
            continue
        if isinstance(row, dict) and {"_step", "_time"} <= row.keys():
            rows.append(row)
    about = json.loads(_about(path).read_text(encoding="utf-8")) if _about(path).is_file() else {}
    starts = about.get("starts") or [{"time": math.inf, "config": {}}]
    # A tracker starts with the first rows that it gets.
    began = min([starts[0]["time"], *(row["_time"] for row in rows[:1])])
    points: dict[str, list[tuple[int, float, float]]] = {}
    for row in rows:
        for key, value in row.items():
            number = _number(value)
            if not key.startswith("_") and "_table" not in row and number is not None:
                points.setdefault(key, []).append((row["_step"], row["_time"] - began, number))
    return Run(name, _settings(starts[-1]["config"]), len(rows), began, points)


def _number(value: Any) -> float | None:
    """Numbers, and the words that JSON lines have for those that are not finite."""
    if value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters, and the values of the plan."""
    plan = config.get("easymp", {}).get("plan", {})
    decided = {name: c["value"] for name, c in plan.items() if isinstance(c, dict) and "value" in c}
    return flat({**decided, **{name: value for name, value in config.items() if name != "easymp"}})


def choose(runs: Sequence[Run], asked: Sequence[str]) -> list[str]:
    """The logged names to draw: those that match one of `asked`, in this order; by default all."""
    known = list(dict.fromkeys(name for run in runs for name in run.points))
    chosen: dict[str, None] = {}
    for pattern in asked or ["*"]:
        found = [name for name in known if name == pattern or fnmatchcase(name, pattern)]
        if not found:
            near, logged = nearest(pattern, known) or ".", ", ".join(known) or "none"
            raise SettingError(f"no run has logged a number as {pattern!r}{near} Logged: {logged}")
        chosen |= dict.fromkeys(found)
    return list(chosen)


def last(runs: Sequence[Run], names: Sequence[str]) -> Iterator[list[str]]:
    """A row a run: its name, rows, last step, and the last value of each name."""
    for run in runs:
        step = max((points[-1][0] for points in run.points.values()), default=0)
        values = [f"{run.points[name][-1][2]:.4g}" if name in run.points else "–" for name in names]
        yield [run.name, f"{run.rows:,}", f"{step:,}", *values]


# -- curves ------------------------------------------------------------------------------------------------------------


def panels(runs: Sequence[Run], names: Sequence[str], across: str) -> Iterator[Panel]:
    """A panel for each name, with a curve for each run."""
    longest = max((at for run in runs for points in run.points.values() for _, at, _ in points), default=0)
    _, seconds, unit = next(span for span in SPANS if longest >= span[0])
    axis, titles = "step" if across == "step" else f"{unit} since the start", [run.name for run in runs]
    for name in names:
        lines = []
        for series, run in enumerate(runs):
            points = run.points.get(name, [])
            drawn = [(step if across == "step" else at / seconds, value) for step, at, value in points]
            lines += smoothed(series, drawn)
        if lines:
            yield name, partial(curves, lines=lines, names=titles, across=axis, up=name)


def write_page(runs: Sequence[Run], names: Sequence[str], made: Sequence[Panel], file: Path) -> None:
    """One HTML file: a picture for each panel, and a table of the runs with the settings that differ."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    unlike = [key for key in keys if len({str(run.config.get(key)) for run in runs}) > 1]
    settings = [["–" if (v := run.config.get(key)) is None else str(v) for key in unlike] for run in runs]
    text = page(
        "plot.html.jinja",
        made,
        title=f"{len(runs)} runs" if len(runs) > 1 else runs[0].name,
        heads=["run", "rows", "step", *names, *unlike],
        rows=[[*cells, *more] for cells, more in zip(last(runs, names), settings)],
        unlike=unlike,
        noisy=any(len(points) > NOISY for run in runs for points in run.points.values()),
    )
    file.write_text(text, encoding="utf-8")


# -- drawing, for `easymp compare`, too --------------------------------------------------------------------------------


class Line(NamedTuple):
    """One curve of series number `series`; the `main` one is drawn strongly and named, others faintly."""

    series: int
    points: list[tuple[float, float]]
    main: bool


Panel = tuple[str, Callable[["Axes"], None]]  # a title, and a function that draws


def missing(*needed: str) -> str:
    """A sentence that names the packages among `needed` that are not installed; "" where all are."""
    absent = [name for name in needed if find_spec(name) is None]
    if not absent:
        return ""
    are, them = ("are", "them") if absent[1:] else ("is", "it")
    return f"{' and '.join(absent)} {are} not installed. pip install 'easymp[report]' brings {them}."


def smoothed(series: int, points: list[tuple[float, float]], main: bool = True) -> Iterator[Line]:
    """The line of `points` without those that are not finite; of a noisy one its running mean, the main one's values behind it."""
    points = [point for point in points if all(map(math.isfinite, point))]
    if len(points) > NOISY:
        if main:
            yield Line(series, thinned(points), False)
        points = running_mean(points)
    if points:
        yield Line(series, thinned(points), main)


def thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """`MOST` of `points` or fewer, at equal distances, the last one included."""
    return points[:: -1 - (len(points) - 1) // MOST][::-1]


def running_mean(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Each value the mean of those around it: of one part in `PARTS` of all, fewer at the ends, as many on either side."""
    half = max(1, len(points) // (2 * PARTS))
    sums = [0.0, *accumulate(value for _, value in points)]
    means = []
    for i, (x, _) in enumerate(points):
        reach = min(half, i, len(points) - 1 - i)
        means.append((x, (sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1)))
    return means


def curves(
    axes: Axes,
    lines: Sequence[Line],
    names: Sequence[str],
    across: str,
    up: str,
    share: bool = False,
    from_zero: bool = False,
) -> None:
    """Draw `lines`, with one legend entry for each main line.

    Args:
        names: of the series, by number.
        across, up: labels of the axes, with units.
        share: values from 0 to 1 are shown as percent.
        from_zero: the vertical axis begins at 0. Otherwise it is logarithmic where values differ by more than `LOG` times.
    """
    values = [value for line in lines for _, value in line.points]
    if from_zero:
        axes.set_ylim(0, 1.05 * max(values))
    elif share and all(0 <= value <= 1 for value in values):
        axes.yaxis.set_major_formatter(lambda value, _: f"{value * 100:g}%")
    elif min(values) > 0 and max(values) > LOG * min(values):  # equal steps would hide the small ones
        logarithmic(axes, "y")
    for line in lines:
        pattern = tuple(float(length) for length in dashes(line.series).split())
        axes.plot(
            *zip(*line.points),
            color=colour(line.series),
            linestyle=(0, pattern) if pattern and line.main else "-",
            linewidth=1.8 if line.main else 0.9,
            alpha=1 if line.main else 0.3,
            marker="o" if len(line.points) == 1 else None,
            label=names[line.series] if line.main else None,
        )
    ends = [max(x for x, _ in line.points) for line in lines if line.main]
    if ends and min(ends) > 0 and max(ends) > OUTLIER * min(ends):
        logarithmic(axes, "x")
        axes.set_xlim(left=min(ends) / 100)
        across += ", logarithmic"
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.legend(fontsize="small")


def logarithmic(axes: Axes, which: str, at: Sequence[float] = (1,)) -> None:
    """Make the axis "x" or "y" of `axes` logarithmic, with plain numbers `at` these multiples of powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    getattr(axes, f"set_{which}scale")("log")
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(LogLocator(subs=at))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def draw(made: Sequence[Panel], columns: int, form: str, head: str = "") -> bytes:
    """All panels in one image, as ``"svg"`` (for light and dark pages) or ``"png"``, under `head`."""
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
        svg = form == "svg"
        about = {"Date" if svg else "Software": None}
        figure.savefig(file, format=form, dpi=150, transparent=svg, metadata=about)
    if not svg:
        return file.getvalue()
    text = file.getvalue().decode().replace(INK, "var(--ink)").replace(GRID, "var(--grid)")
    return text.replace("<defs>", DARK % (INK, GRID) + "<defs>", 1).encode()


def colour(series: int) -> str:
    return COLOURS[series % len(COLOURS)]


def dashes(series: int) -> str:
    """Dashes of a series: each pair of them and a colour occurs once, for as many series as there are pairs."""
    return DASHES[(series + series // len(COLOURS)) % len(DASHES)]


def page(template: str, made: Sequence[Panel], **values: Any) -> str:
    """One HTML file without scripts and links, of a jinja2 template in this folder; words from outside are escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    blocks = {"trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, **blocks)
    environment.globals |= {"colour": colour, "dashes": dashes}
    coded = ((one[0], base64.b64encode(draw([one], 1, "svg")).decode()) for one in made)
    images = [(title, f"data:image/svg+xml;base64,{code}") for title, code in coded]
    return environment.get_template(template).render(images=images, **values)
