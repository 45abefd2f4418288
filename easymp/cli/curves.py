"""Curves in panels, drawn by matplotlib, and HTML pages with them: for `easymp plot` and `easymp compare`.

Colours are Okabe and Ito's, which any kind of colour vision can tell apart (Okabe, Ito: Color Universal Design, 2008). Each series
has its own dashes, too.
"""

from __future__ import annotations

import base64
import io
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
        figure.savefig(
            file, format=form, dpi=150, transparent=svg, metadata={"Date" if svg else "Software": None}
        )
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
    """One HTML file without scripts and links, of a jinja2 template in this folder; words from outside are escaped.

    Args:
        made: its plots, which the template gets as `images`: titles with the addresses of images.
        values: what else it names.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"colour": colour, "dashes": dashes}
    coded = ((one[0], base64.b64encode(draw([one], 1, "svg")).decode()) for one in made)
    images = [(title, f"data:image/svg+xml;base64,{code}") for title, code in coded]
    return environment.get_template(template).render(images=images, **values)
