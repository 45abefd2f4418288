"""Run a script under several plans, in turn, and say which one to take.

Time, memory, loss and accuracy of each: as a table, and as a picture of curves. SCRIPT needs an Accelerator, and
acc.log({"loss": loss}) for curves; accuracy is logged alike. Plans win over its own settings. Each combination of the
values given is one; the results of the others are compared with those of the first.

examples:
  easymp compare train.py --precision fp32,bf16
  easymp compare train.py --precision fp32,bf16,O1 --repeats 5 -- --epochs 2
  easymp compare train.py --strategy ddp,fsdp --processes 2
  easymp compare train.py --vary compile=no,blocks --vary seed=0,1
  easymp compare train.py --vary batch=32,64 -- --batch-size {batch}
  easymp compare train.py --strategy fsdp --vary strategy_options.cpu_offload=false,true
  easymp compare fp32=runs/a fp32=runs/b bf16=runs/c     runs that were recorded

Words after -- are the script's own. Three runs of each plan or more can show a difference of times; fewer are a hint.
The folder --output gets all numbers with the plans (compare.json), a picture (compare.png) and the raw records; the
picture needs matplotlib: pip install 'easymp[report]'.

Exit codes: 0 all runs finished; 1 one did not, and the table says why; 2 wrong usage; 130 interrupted, after showing
the finished runs.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from ...base import env
from ...base.units import duration, rate, size
from ...base.units import unit as unit_of
from ...errors import SettingError
from ...launcher.entrypoints import check_script
from ...settings import overrides, read_pairs
from ..harness import INTERRUPTED, Script, check_new, count
from ..harness import reworded as reworded
from ..harness import run as run_once
from ..plot import Line, Panel, draw, points_of, smooth
from ..terminal import BOLD, GREEN, RED, YELLOW, ended_by_signals, missing_packages, paint, plain, table, wrap
from .runs import Comparison, Record, Run, Variant, conclude, load, median, name_and_folder, ratio_text, read, variants

SINCE_FIRST_UPDATE = "seconds from the first update"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "easymp compare SCRIPT [OPTIONS] [-- ARGUMENTS]\n       easymp compare RUN RUN … [OPTIONS]"
    add = parser.add_argument
    script = "its path, and the script's own after --; or folders of recorded runs, each as NAME=FOLDER or FOLDER"
    add("script", nargs="+", metavar="SCRIPT", help=script)
    precisions = "of fp32, tf32, bf16, fp16, fp8, bf16-true, fp16-true, O0 to O3, auto (the script's own)"
    add("--precision", type=_values, default=[], metavar="A,B", help=precisions)
    add("--strategy", type=_values, default=[], metavar="A,B", help="of single, ddp, zero1, fsdp … (the script's own)")
    add("--processes", type=_values, default=[], metavar="N,M", help="how many (one an accelerator, 1 without any)")
    vary = (
        "values of any setting, such as gradient_accumulation_steps=1,4 or strategy_options.OPTION=A,B; or of {NAME} "
        "among the script's own arguments; may be repeated"
    )
    add("--vary", action="append", type=_option, default=[], metavar="NAME=A,B", help=vary)
    sets = "a setting of all plans, over the script's own; may be repeated"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=sets)
    repeats = "number of runs of each, in rounds; medians are compared (1)"
    add("--repeats", type=count, default=1, metavar="N", help=repeats)
    seed = "of the first round, one more in each that follows (the script's own)"
    add("--seed", type=int, metavar="N", help=seed)
    timeout = "stop a run that takes longer, and go on with the next"
    add("--timeout", type=float, metavar="SECONDS", help=timeout)
    metric = "compare this logged value (loss and accuracy); may be repeated"
    add("--metric", action="append", default=[], metavar="NAME", help=metric)
    add("--output", type=Path, metavar="DIR", help="a new folder for the reports (easymp-compare-DATE)")
    add("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    add("--json", action="store_true", help="print all of it as JSON, in place of the table")


def _values(text: str) -> list[str]:
    """Values with commas between them; one with commas in it stands in double quotes."""
    return [value.strip() for value in next(csv.reader([text], skipinitialspace=True), [])]


def _option(text: str) -> tuple[str, list[str]]:
    name, equals, values = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=A,B")
    return "mixed_precision" if name == "precision" else name, _values(values) or [""]


def run(args: argparse.Namespace) -> int:
    folder = args.output or Path(time.strftime("easymp-compare-%Y%m%d-%H%M%S"))
    flags = [("mixed_precision", args.precision), ("strategy", args.strategy), ("processes", args.processes)]
    options = [(name, values) for name, values in (*flags, *args.vary) if values]
    fixed = read_pairs(args.set)
    names = [*fixed, *(name for name, _ in options)]
    if args.seed is not None and "seed" in names:
        raise SettingError("--seed is set, and the setting seed too: leave one of them out")
    if repeated := [name for name in names if names.count(name) > 1]:
        raise SettingError(f"{repeated[0]} is given twice: give all its values at once, as in A,B,C")
    script = Script(args.script[0], args.arguments, args.module)
    check_new(folder)
    if not script.module and name_and_folder(script.path)[1].is_dir():
        if names or args.seed is not None or args.arguments or args.repeats > 1:
            raise SettingError("runs that exist are compared as they are: leave out what would start new ones")
        comparison = conclude(None, load(args.script), folder.absolute(), args.metric)
        folder.mkdir(parents=True, exist_ok=True)
    else:
        missing = [path for path in args.script if not name_and_folder(path)[1].exists()]
        if args.script[1:] and args.script[0] in missing and not script.module:
            raise SettingError(f"{', '.join(missing)}: there is no such file or folder")
        if args.script[1:]:
            raise SettingError(f"{' '.join(args.script[1:])}: one script is compared, and its own arguments follow --")
        check_script(script.path, script.module)
        plans = variants(dict(options), args.arguments)
        # SIGTERM ends the running ranks as Ctrl-C does, and the finished runs are shown.
        with ended_by_signals(), env.override(**overrides(args.set)):
            comparison = compare(script, plans, folder.absolute(), args)
    files, problem = write(comparison)
    print(json.dumps(as_json(comparison), indent=2) if args.json else terminal_text(comparison))
    paths = [os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path) for path in files]
    print("\nwrote " + "\n      ".join(paths), file=sys.stderr if args.json else sys.stdout)
    if problem:
        print(wrap(problem), file=sys.stderr)
    return 130 if comparison.interrupted else int(any(plan.problems for plan in comparison.summaries))


def compare(script: Script, plans: Sequence[Variant], folder: Path, args: argparse.Namespace) -> Comparison:
    """Run the script under each plan, round by round, so that changes of the machine's load meet all of them."""
    runs: list[Run] = []
    total = len(plans) * args.repeats
    for number, (index, variant) in product(range(1, args.repeats + 1), enumerate(plans, 1)):
        repeat = f", run {number} of {args.repeats}" if args.repeats > 1 else ""
        head = f"{len(runs) + 1}/{total} {plain(variant.name)}{repeat}"
        safe_name = "".join(x if x.isascii() and x.isalnum() else "-" for x in variant.name)[:100]
        run_folder = folder / "runs" / f"{index}-{safe_name}-{number}"
        seed = None if args.seed is None else args.seed + number - 1
        settings = variant.settings if seed is None else {**variant.settings, "seed": str(seed)}
        end = run_once(head, variant.command(script), run_folder, settings, args.timeout)
        runs.append(Run(variant, number, seed, end, read(run_folder)))
        if end.status == INTERRUPTED:
            break
        if seconds := (total - len(runs)) * sum(run.end.wall for run in runs) / len(runs):
            print(f"about {duration(seconds)} left", file=sys.stderr, flush=True)
    return conclude(script, runs, folder, args.metric)


# -- the table


def rows(comparison: Comparison) -> list[list[str]]:
    """The heads and a row a plan, with medians of its runs; columns without a value are left out."""
    plans, standings = comparison.summaries, comparison.verdict.standings

    def text(values: Sequence[float], spell: Callable[[float], str]) -> str:
        return spell(median(values)) if values else "–"

    times = "time", [text(plan.seconds, duration) for plan in plans]
    if len({count for plan in plans for count in plan.counts}) > 1:  # the runs differ in length
        times = f"{plans[0].unit}/s", [text(plan.speeds, rate) for plan in plans]
    columns = [
        ("", [f"{'→' if plan.name == comparison.verdict.recommended else ' '} {plan.name}" for plan in plans]),
        times,
        ("ratio", [ratio_text(standing) for standing in standings]),
        ("memory", [text(plan.peaks, size) for plan in plans]),
        *((metric.name, [text(plan.finals(metric), metric.text) for plan in plans]) for metric in comparison.metrics),
        ("result", [standing.result or "–" for standing in standings]),
        ("start-up", [text(plan.startups, duration) for plan in plans]),
    ]
    columns = [(head, cells) for head, cells in columns if any(cell != "–" for cell in cells)]
    return [[head for head, _ in columns], *map(list, zip(*(cells for _, cells in columns)))]


def terminal_text(comparison: Comparison) -> str:
    verdict, plans, cells = comparison.verdict, comparison.summaries, rows(comparison)
    colours = [GREEN if plan.name == verdict.recommended else "" if plan.speeds else RED for plan in plans]
    lines = table(cells, right=set(range(1, len(cells[0])))).splitlines()
    text = [paint(wrap(plain(verdict.sentence)), BOLD), "", *map(paint, lines, [BOLD, *colours])]
    remarks = [f"{plan.name} {problem}" for plan in plans for problem in plan.problems]
    text += [wrap(plain(line), "  ") for line in (*remarks, comparison.missing) if line]
    return "\n".join([*text, *(paint(wrap(plain(line)), YELLOW) for line in verdict.doubts)])


# -- files


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Everything, in JSON's own types; numbers that are not finite are None."""

    def spread(values: Sequence[float]) -> dict[str, float] | None:
        if not values:
            return None
        return {"count": len(values), "median": median(values), "least": min(values), "most": max(values)}

    def json_value(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            value = vars(value)
        if isinstance(value, dict):
            return {str(name): json_value(member) for name, member in value.items()}
        if isinstance(value, (list, tuple)):
            return [json_value(member) for member in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    script = comparison.script
    plans = [
        {
            "name": plan.name,
            "settings": {**plan.variant.settings, **plan.variant.placeholders},
            "processes": plan.variant.processes,
            "command": plan.variant.command(script) if script else [],
            "seconds": spread(plan.seconds),
            "speed": spread(plan.speeds),
            "peak_bytes": spread(plan.peaks),
            "seconds_before": spread(plan.startups),
            "metrics": {metric.name: spread(plan.finals(metric)) for metric in comparison.metrics},
            "runs": [
                {**vars(run.end), "number": run.number, "seed": run.seed, "record": run.record} for run in plan.runs
            ],
        }
        for plan in comparison.summaries
    ]
    record = {
        "script": script.path if script else None,
        "arguments": script.arguments if script else [],
        "verdict": comparison.verdict,
        "metrics": comparison.metrics,
        "machine": comparison.machine,
        "interrupted": comparison.interrupted,
        "plans": plans,
    }
    return {name: json_value(value) for name, value in record.items()}


def write(comparison: Comparison) -> tuple[list[Path], str]:
    """Write ``compare.json`` and ``compare.png``; returns their paths, and why there is no picture or ""."""
    path, picture = comparison.folder / "compare.json", comparison.folder / "compare.png"
    path.write_text(json.dumps(as_json(comparison), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if sentence := missing_packages("report", "matplotlib"):
        return [path], f"No picture: {sentence}"
    panels = make_panels(comparison)
    if not panels:
        return [path], ""
    names = [plan.name for plan in comparison.summaries]
    picture.write_bytes(draw(panels, names, "png", comparison.verdict.sentence))
    return [path, picture], ""


# -- plots


def make_panels(comparison: Comparison) -> list[Panel]:
    """The compared values by updates and by seconds, and memory by seconds."""
    plans, panels = comparison.summaries, list[Panel]()

    def lines_of(points_of_record: Callable[[Record], list[tuple[float, float]]]) -> list[Line]:
        """The lines of each run, that of the typical one of a plan last, on top."""
        lines: list[Line] = []
        for index, plan in enumerate(plans):
            typical = plan.typical
            for run in sorted(plan.runs, key=lambda run: run is typical):
                lines += smooth(index, points_of_record(run.record) if run.record else [], run is typical)
        return lines

    for metric, by_time in product(comparison.metrics[:2], (False, True)):
        name, unit = metric.name, "seconds" if by_time else "updates"
        lines = lines_of(partial(_curve, name, by_time))
        x_label = SINCE_FIRST_UPDATE if by_time else "optimizer updates"
        panels.append(Panel(f"{name} by {unit}", lines, x_label, name, percent=metric.share))
    name, bytes_ = unit_of(max((peak for plan in plans for peak in plan.peaks), default=1))
    lines = lines_of(lambda record: [(seconds, count / bytes_) for seconds, count in record.memory])
    on_device = any(record.device_memory for plan in plans for record in plan.records)
    title = "Memory allocated on the device" if on_device else "Memory of the process"
    panels.append(Panel(title, lines, SINCE_FIRST_UPDATE, f"memory, {name}", from_zero=True))
    return [panel for panel in panels if panel.lines]


def _curve(name: str, by_time: bool, record: Record) -> list[tuple[float, float]]:
    return points_of(record.curves.get(name, ()), by_time)
