"""The plots, by matplotlib: as SVG for the page, in colours that the page's style decides, and as one PNG.

Colours are Okabe and Ito's, which can be told apart with any kind of colour vision (Okabe, Ito: Color Universal Design, 2008), and each
plan has its own dashes, too. Text in an SVG stays text, so that it can be read at any size and searched.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.units import unit as unit_of
from .comparison import Comparison
from .metrics import Metric
from .series import Line, by_seconds, by_update, memory, noisy, wants_log
from .summaries import Summary
from .table import unit
from .writing import rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # light grounds
DARK = ("#5cb3f0", "#ff8f4d", "#2ec79a", "#eba6cb", "#f5bd4f", "#9bd5f7")  # the same on dark ones
DASHES: tuple[Any, ...] = (
    "-",
    (0, (5, 2)),
    (0, (1.5, 1.5)),
    (0, (6, 2, 1.5, 2)),
    (0, (3, 1, 1, 1, 1, 1)),
    (0, (8, 3)),
)
INK, FAINT = "#1b1f24", "#c9ced6"  # text, and lines behind
WIDTH, HEIGHT = 340, 230  # of a plot, in its own units, of which a phone shows about one a pixel
TEXT = 10.5
DPI = 72  # so that matplotlib's points, and the SVG's units, are one


class Plot:
    """One plot.

    Attributes:
        key: its own name.
        words: what it shows, for who cannot see it.
        draw: fills axes.
        note: what stands below it.
    """

    def __init__(
        self,
        key: str,
        title: str,
        words: str,
        draw: Callable[[Axes], None],
        note: str = "",
        height: float = HEIGHT,
    ) -> None:
        self.key, self.title, self.words, self.draw, self.note, self.height = (
            key,
            title,
            words,
            draw,
            note,
            height,
        )

    def svg(self) -> str:
        """An ``<svg>`` element, as wide as its place, without ids that another one could have."""
        with _style(self.key):
            figure = _figure(WIDTH, self.height)
            self.draw(figure.add_subplot())
            file = io.StringIO()
            figure.savefig(
                file,
                format="svg",
                transparent=True,
                metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
            )
        return _for_page(file.getvalue(), self.words)


def plots(found: Comparison) -> list[Plot]:
    """Those for which there is something to show, in their order on the page."""
    summaries, made = found.summaries, []
    names = [summary.name for summary in summaries]
    for metric in found.metrics[:2]:
        note = (
            "Lines are running means; the values themselves lie faintly behind."
            if noisy(summaries, metric)
            else ""
        )
        for where, read, axis in (
            ("update", by_update, "optimizer updates"),
            ("time", by_seconds, "seconds"),
        ):
            lines = read(summaries, metric)
            if lines:
                title, draw = f"{metric.name} against {where}", _curves(names, lines, metric, axis)
                made.append(
                    Plot(
                        f"{metric.name}-{where}",
                        title,
                        _said(title, names, lines),
                        draw,
                        note,
                        _tall(names, lines),
                    )
                )
    lines = memory(summaries)
    if lines:
        device = any(run.record.device_memory for summary in summaries for run in summary.runs if run.record)
        title = "memory allocated over time" if device else "memory of the process over time"
        made.append(
            Plot(
                "memory", title, _said(title, names, lines), _memory(names, lines), height=_tall(names, lines)
            )
        )
    done = [(index, summary) for index, summary in enumerate(summaries) if summary.speed is not None]
    if done:
        title = f"throughput, {unit(summaries)} a second"
        words = f"{title}: " + ", ".join(
            f"{summary.name} {rate(summary.speed.median)}" for _, summary in done if summary.speed
        )
        made.append(Plot("speed", title, words, _bars(done), height=max(110, 58 + 36 * len(done))))
    return made


def write_png(found: Comparison, path: Path) -> bool:
    """All plots in one picture, on white, under the verdict; False where there is none."""
    made = plots(found)
    if not made:
        return False
    with _style("picture"):
        rows = -(-len(made) // 2)
        figure = _figure(2 * 400, 70 + rows * (40 + max(plot.height for plot in made)), dpi=150)
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
        figure.suptitle(textwrap.fill(found.verdict.sentence, 110), fontsize=11, x=0.02, ha="left", color=INK)
        for place, plot in enumerate(made, 1):
            axes = figure.add_subplot(rows, 2, place)
            axes.set_title(
                plot.title, loc="left", fontsize=11, color=INK, pad=24 if plot.key != "speed" else 8
            )
            plot.draw(axes)
        figure.savefig(path, format="png", facecolor="white", dpi=150, metadata={"Software": None})
    return True


def colour(plan: int) -> str:
    return COLOURS[plan % len(COLOURS)]


def dashes(plan: int) -> Any:
    """Of each plan its own with the colour, for as many as there are pairs of both."""
    return DASHES[(plan + plan // len(COLOURS)) % len(DASHES)]


# -- what is drawn -----------------------------------------------------------------------------------------------------


def _curves(names: Sequence[str], lines: Sequence[Line], metric: Metric, axis: str) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        _draw(axes, names, lines)
        if metric.share and all(0 <= value <= 1 for line in lines for _, value in line.points):
            axes.yaxis.set_major_formatter(lambda value, _: f"{value * 100:g}%")
        elif wants_log(lines):
            axes.set_yscale("log")
            axes.yaxis.set_minor_formatter("")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel(axis)

    return draw


def _memory(names: Sequence[str], lines: Sequence[Line]) -> Callable[[Axes], None]:
    name, size = unit_of(max(value for line in lines for _, value in line.points))

    def draw(axes: Axes) -> None:
        _draw(
            axes,
            names,
            [Line(line.plan, [(x, y / size) for x, y in line.points], line.main) for line in lines],
        )
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} {name}")
        axes.axvline(0, color=FAINT, linewidth=0.8)
        axes.set_xlabel("seconds from the first update")

    return draw


def _draw(axes: Axes, names: Sequence[str], lines: Sequence[Line]) -> None:
    for line in lines:
        x, y = zip(*line.points)
        few = len(x) == 1
        axes.plot(
            x,
            y,
            color=colour(line.plan),
            linestyle=dashes(line.plan) if line.main else "-",
            linewidth=1.8 if line.main else 0.9,
            alpha=1 if line.main else 0.3,
            marker="o" if few else None,
            markersize=4,
            label=names[line.plan] if line.main else None,
        )
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        ncols=_columns([names[line.plan] for line in lines if line.main]),
        frameon=False,
        handlelength=2.6,
        columnspacing=1.2,
        borderpad=0.2,
        borderaxespad=0.1,
    )
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(_few_ticks(6))


def _bars(done: Sequence[tuple[int, Summary]]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        most = max(summary.speed.most for _, summary in done if summary.speed)
        for place, (plan, summary) in enumerate(done):
            speed = summary.speed
            assert speed is not None
            axes.barh(place, speed.median, height=0.42, color=colour(plan))
            if speed.count > 1:
                axes.plot(
                    [speed.least, speed.most],
                    [place, place],
                    color=INK,
                    linewidth=1.2,
                    marker="|",
                    markersize=7,
                )
            axes.text(0, place - 0.3, summary.name, va="bottom", ha="left")
            axes.text(speed.most + most * 0.02, place, rate(speed.median), va="center", ha="left")
        axes.set_xlim(0, most * 1.18)
        axes.set_ylim(len(done) - 0.6, -0.85)
        axes.set_yticks([])
        axes.xaxis.set_major_locator(_few_ticks(4))
        axes.xaxis.set_major_formatter(lambda value, _: rate(value) if value else "0")
        axes.grid(axis="y", visible=False)

    return draw


def _few_ticks(most: int) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(most)


def _columns(names: Sequence[str]) -> int:
    """Of a legend, so that it is no wider than a plot."""
    return max(1, min(len(names), 46 // (max(map(len, names), default=1) + 6)))


def _tall(names: Sequence[str], lines: Sequence[Line]) -> float:
    """Height of a plot with a legend that may have several rows."""
    shown = [names[line.plan] for line in lines if line.main]
    return HEIGHT + 15 * (-(-len(shown) // _columns(shown)) - 1)


def _said(title: str, names: Sequence[str], lines: Sequence[Line]) -> str:
    ends = [
        f"{names[line.plan]} from {line.points[0][1]:.4g} to {line.points[-1][1]:.4g}"
        for line in lines
        if line.main
    ]
    return f"{title}: {', '.join(ends)}"


# -- how it is drawn ---------------------------------------------------------------------------------------------------


@contextmanager
def _style(salt: str) -> Any:
    # At first use: an optional package.
    import matplotlib

    style = {
        "text.parse_math": False,  # a plan's or a metric's name is no formula
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": TEXT,
        "axes.titlesize": TEXT,
        "axes.labelsize": TEXT,
        "xtick.labelsize": TEXT,
        "ytick.labelsize": TEXT,
        "legend.fontsize": TEXT,
        "text.color": INK,
        "axes.labelcolor": INK,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "xtick.color": FAINT,
        "ytick.color": FAINT,
        "axes.edgecolor": FAINT,
        "grid.color": FAINT,
        "grid.linewidth": 0.6,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.major.size": 3,
        "ytick.major.size": 0,
        "ytick.minor.size": 0,
        "path.simplify_threshold": 0.2,
    }
    with matplotlib.rc_context(style):
        yield


def _figure(width: float, height: float, dpi: int = DPI) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width / DPI, height / DPI), dpi=dpi, layout="constrained")


def _for_page(svg: str, words: str) -> str:
    """The element alone, its colours variables of the page's style, its names nobody else's business."""
    from markupsafe import escape

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(
        r"<style.*?</style>", "", svg, flags=re.DOTALL
    )  # rules for *, which would be the whole page's
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    variables = {INK: "--ink", FAINT: "--line", **{hue: f"--plan-{i}" for i, hue in enumerate(COLOURS)}}
    for hue, name in variables.items():
        svg = svg.replace(f": {hue}", f": var({name})")
    box = re.search(r'viewBox="[^"]*"', svg)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box[0] if box else ""} role="img"><title>{escape(words)}</title>'
    return head + svg[svg.index(">") + 1 :]
