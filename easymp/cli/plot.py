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
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from ..base.units import flat
from ..errors import SettingError, nearest
from .curves import NOISY, Panel, curves, draw, missing, page, smoothed
from .terminal import table

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


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One file of rows.

    Attributes:
        name: of the folder or the file, unlike those of the other runs.
        config: hyperparameters and settings by name, of the last start.
        rows: number of rows.
        began: seconds since 1970.
        points: by the logged name, (step, seconds from the start, value).
    """

    name: str
    config: Mapping[str, Any]
    rows: int
    began: float
    points: Mapping[str, list[tuple[int, float, float]]]


def read(places: Sequence[Path]) -> list[Run]:
    """The runs in files and folders.

    Raises:
        SettingError: a place is missing, or has no rows.
    """
    files: dict[Path, None] = {}
    for place in places:
        found = (
            [place] if place.is_file() else sorted(p for p in place.rglob("*.jsonl") if _about(p).is_file())
        )
        if not found:
            why = (
                "no run has logged JSON lines below it"
                if place.is_dir()
                else "there is no such file or folder"
            )
            raise SettingError(
                f"{place}: {why}. Pass the file of rows (log.jsonl), or the run's project folder"
            )
        files |= dict.fromkeys(path.resolve() for path in found)
    runs = [_read(path, name) for path, name in zip(files, _names(list(files)))]
    if not any(run.rows for run in runs):
        raise SettingError(
            f"{next(iter(files))} has no rows of a run: pass a file that log_with='jsonl' has written"
        )
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
    decided = {
        name: said["value"] for name, said in plan.items() if isinstance(said, dict) and "value" in said
    }
    return flat({**decided, **{name: value for name, value in config.items() if name != "easymp"}})


def choose(runs: Sequence[Run], asked: Sequence[str]) -> list[str]:
    """The logged names to draw: those that match one of `asked`, in this order; by default all.

    Raises:
        SettingError: no run has logged a number of such a name.
    """
    known = list(dict.fromkeys(name for run in runs for name in run.points))
    chosen: dict[str, None] = {}
    for pattern in asked or ["*"]:
        found = [name for name in known if name == pattern or fnmatchcase(name, pattern)]
        if not found:
            raise SettingError(
                f"no run has logged a number as {pattern!r}{nearest(pattern, known) or '.'} Logged: {', '.join(known) or 'none'}"
            )
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
    settings = [
        ["–" if run.config.get(key) is None else str(run.config[key]) for key in unlike] for run in runs
    ]
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
