"""Run a script under several plans, in turn, and say which one to take.

Time, memory, loss and accuracy of each: as a table, and as a page with plots.
SCRIPT needs an Accelerator, and acc.log({"loss": loss}) for curves; accuracy is
logged alike. Plans win over its own settings. Each combination of the values
given is one; the results of the others are compared with those of the first.

examples:
  easymp compare train.py --precision fp32,bf16
  easymp compare train.py --precision fp32,bf16,O1 --repeats 5 -- --epochs 2
  easymp compare train.py --strategy ddp,fsdp --processes 2
  easymp compare train.py --vary compile=no,blocks --vary seed=0,1
  easymp compare train.py --vary batch=32,64 -- --batch-size {batch}
  easymp compare train.py --strategy fsdp --vary strategy_options.cpu_offload=false,true
  easymp compare train.py --strategy ddp,fsdp --predict train:make_model --input 8x1024:int64
  easymp compare fp32=runs/a fp32=runs/b bf16=runs/c     runs that exist

Words after -- are the script's own. Three runs of each plan or more can show
a difference of times; fewer are a hint. The folder --output gets the page
(compare.html, one file), a picture, a JSON and the raw records; page and
picture need matplotlib: pip install 'easymp[report]'.

Exit codes: 0 all runs finished; 1 one did not, and the table says why;
2 wrong usage; 130 interrupted, after showing the finished runs.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...base import env
from ...base.lazy import modules_at_first_use
from ...base.units import duration, rate, size
from ...base.units import unit as unit_of
from ...errors import EasympError, SettingError
from ...launcher.entrypoints import check_script
from ...settings import OVERRIDE, overrides, read_pairs
from ..estimate import kind_of
from ..plot import NOISY, OUTLIER, Line, Panel, colour, curves, draw, logarithmic, missing, page, smoothed
from ..terminal import BOLD, DIM, GREEN, RED, YELLOW, ended_by_signals, paint, plain, table, width, wrap
from .runs import (
    FINISHED,
    INTERRUPTED,
    Record,
    Run,
    Summary,
    Task,
    Variant,
    is_run,
    load,
    middle,
    read,
    variants,
)
from .runs import run as run_once
from .verdict import Comparison, conclude, is_busy, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ...training.memory import Prediction
    from ..estimate import rows as estimate_rows
else:  # it imports torch
    modules_at_first_use(globals(), estimate_rows=".estimate.rows")

NEEDED = ("matplotlib", "jinja2")
SHOWN = ("mixed_precision", "strategy", "gradient_accumulation_steps")  # a decision of the plan shows them
OUTSIDE = "set from outside"
ALIKE = 1.05  # the largest median as a multiple of the smallest, up to which a column has nothing to tell
EVERY = 10.0  # seconds between two lines about a run, where no terminal shows one that changes


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "easymp compare SCRIPT [OPTIONS] [-- ARGUMENTS]\n       easymp compare RUN RUN … [OPTIONS]"
    _options(parser)
    # PARSER is one word and all that follow it, as they are; SCRIPT and a REMAINDER would lose a "--" between them.
    words = "its path, and the script's own after --; or folders of runs that exist, each as NAME=FOLDER or FOLDER"
    parser.add_argument("script", nargs=argparse.PARSER, action=_Rest, metavar="SCRIPT", help=words)


class _Rest(argparse.Action):
    """The script, options of ours as far as ``--``, and the script's own arguments; or runs, and options."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        script, *rest = values[1:] if values[0] == "--" and values[1:] else values
        cut = rest.index("--") if "--" in rest else len(rest)
        again = argparse.ArgumentParser(parser.prog, usage=parser.usage, allow_abbrev=False, add_help=False)
        _options(again)
        _, unknown = again.parse_known_args(rest[:cut], namespace)
        namespace.runs = []
        if not namespace.module and is_run(script) and not any(word.startswith("-") for word in unknown):
            namespace.runs, unknown = [script, *unknown], []
        if unknown:
            again.error(
                f"{' '.join(unknown)}: no option of easymp compare. The script's own arguments follow --"
            )
        namespace.script, namespace.arguments = script, rest[cut + 1 :]


def _options(parser: argparse.ArgumentParser) -> None:
    add, several = parser.add_argument, {"type": _words, "default": []}
    precisions = "of fp32, tf32, bf16, fp16, fp8, mxfp8, nvfp4, bf16-true, fp16-true, O0 to O3, auto (the script's own)"
    add("--precision", **several, metavar="A,B", help=precisions)
    add("--strategy", **several, metavar="A,B", help="of single, ddp, zero1, fsdp … (the script's own)")
    add("--processes", **several, metavar="N,M", help="how many (one an accelerator, 1 without any)")
    vary = (
        "values of any setting, such as gradient_accumulation_steps=1,4 or strategy_options.OPTION=A,B; or of {NAME} "
        "among the script's own arguments; may be repeated"
    )
    add("--vary", action="append", type=_varied, default=[], metavar="NAME=A,B", help=vary)
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
    predict = (
        "the model, as for easymp estimate: shows the predicted time of an update beside the measured one, by AdamW and "
        "without recomputation, on a GPU that is known"
    )
    add("--predict", metavar="MODEL", help=predict)
    shape = "with --predict: an argument of forward, for the batch of one process, such as 8x1024:int64; repeatable"
    add("--input", action="append", default=[], metavar="SHAPE", help=shape)
    add("--output", type=Path, metavar="DIR", help="a new folder for the reports (easymp-compare-DATE)")
    add("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    add("--json", action="store_true", help="print all of it as JSON, in place of the table")


def run(args: argparse.Namespace) -> int:
    folder = args.output or Path(time.strftime("easymp-compare-%Y%m%d-%H%M%S"))
    flags = [("mixed_precision", args.precision), ("strategy", args.strategy), ("processes", args.processes)]
    varied = [pair for pair in (*flags, *args.vary) if pair[1]]
    fixed = read_pairs(args.set)
    if args.seed is not None and "seed" in {**dict(varied), **fixed}:
        raise SettingError("--seed is set, and the setting seed too: leave one of them out")
    if twice := [name for i, (name, _) in enumerate(varied) if name in {**dict(varied[:i]), **fixed}]:
        raise SettingError(f"{twice[0]} is given twice: give all its values at once, as in A,B,C")
    if args.runs and (varied or fixed or args.seed is not None or args.arguments or args.repeats > 1):
        raise SettingError("runs that exist are compared as they are: leave out what would start new ones")
    if not args.runs:
        check_script(args.script, args.module)
    if bool(args.predict) != bool(args.input):
        raise SettingError("--predict MODEL and --input SHAPE belong together: pass both, or neither")
    sized = args.predict and estimate_rows.read_model(args.predict, kind_of(args.predict))
    if sized and not sized.runs:
        raise SettingError(f"--predict {args.predict} has no forward to count: pass module:callable")
    sample = estimate_rows.read_sample(args.input) if sized else None
    if folder.exists() and any(folder.iterdir()):
        raise SettingError(f"{str(folder)!r} is there, and not empty: name a new folder with --output")
    if args.runs:
        found = conclude(None, load(args.runs), folder.absolute(), args.metric)
        folder.mkdir(parents=True, exist_ok=True)
    else:
        chosen = variants(dict(varied), args.arguments)
        task = Task(args.script, args.arguments, args.module, args.timeout)
        # SIGTERM ends the running ranks as Ctrl-C does, and the finished runs are shown.
        with ended_by_signals(), env.override(**overrides(args.set)):
            found = compare(task, chosen, folder.absolute(), args)
    if sized:
        found = predicted(found, sized, sample)
    written, trouble = write(found)
    print(json.dumps(as_json(found), indent=2) if args.json else words(found))
    near = [os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path) for path in written]
    print("\nwrote " + "\n      ".join(near), file=sys.stderr if args.json else sys.stdout)
    if trouble:
        print(wrap(trouble), file=sys.stderr)
    return 130 if found.interrupted else int(any(plan.troubles for plan in found.summaries))


def compare(task: Task, chosen: Sequence[Variant], folder: Path, args: argparse.Namespace) -> Comparison:
    """Run `task` under each of `chosen`, round by round, so that changes of the machine's load meet all of them."""
    repeats = args.repeats
    runs: list[Run] = []
    count = len(chosen) * repeats
    for number, (index, variant) in product(range(1, repeats + 1), enumerate(chosen, 1)):
        again = f", run {number} of {repeats}" if repeats > 1 else ""
        head = f"{len(runs) + 1}/{count} {plain(variant.name)}{again}"
        safe = "".join(x if x.isascii() and x.isalnum() else "-" for x in variant.name)[:100]
        place = folder / "runs" / f"{index}-{safe}-{number}"
        its_seed = None if args.seed is None else args.seed + number - 1
        done = [run for run in runs if run.end.status == FINISHED and run.record and run.record.updates]
        alike = [run.record for run in done if run.variant is variant] or [run.record for run in done]
        progress = Progress(head, place, alike[-1] if alike else None)
        end = run_once(task, variant, place, its_seed, progress)
        runs.append(Run(variant, number, its_seed, end, read(place)))
        left = (count - len(runs)) * sum(run.end.wall for run in runs) / len(runs)
        more = f", about {duration(left)} left" if left and end.status != INTERRUPTED else ""
        progress.say(f"{end.status} after {duration(end.wall)}{more}", last=True)
        if end.status == INTERRUPTED:
            break
    return conclude(task, runs, folder, args.metric)


def predicted(found: Comparison, sized: estimate_rows.Sized, sample: Any) -> Comparison:
    """Predict an update of each plan, from what its record says of plan and machine, by `easymp.memory.predict`."""
    made: dict[str, Prediction] = {}
    for summary in found.summaries:
        record = summary.typical and summary.typical.record
        if not record or not {"device", "strategy", "precision", "processes"} <= record.plan.keys():
            continue
        plan = {name: one["value"] if isinstance(one, dict) else one for name, one in record.plan.items()}
        devices = [] if plan["device"] == "cpu" else record.machine["devices"]
        how = {name: plan[name] for name in ("strategy", "precision")}
        try:
            need = estimate_rows.estimate(sized.model, **how, world=plan["processes"], sample=sample)
            device = devices[0]["name"] if devices else ""
            one = estimate_rows.predict(sized.model, need, device, len(devices) or None)
        except EasympError as error:  # the runs are kept
            one = estimate_rows.Prediction(None, why=str(error))
        made[summary.name] = one.of(plan.get("accumulation", 1))
    unknown = [f"{name} ({one.why})" for name, one in made.items() if one.seconds is None]
    said = f" Not predicted: {', '.join(unknown)}." if unknown else ""
    return dataclasses.replace(found, predicted=made, missing=(found.missing + said).strip())


class Progress:
    """Prints how far a run is: its updates, their speed, and the time left, as far as it or an earlier run tells its length."""

    def __init__(self, head: str, folder: Path, known: Record | None) -> None:
        self._head, self._path, self._known = head, folder / "rank-0.jsonl", known
        self._first: dict[str, Any] = {}  # lines of the record: the first update, and the newest
        self._now: dict[str, Any] = {}
        self._read, self._live = 0, sys.stderr.isatty()
        self.say("starting")

    def __call__(self) -> None:
        self._look()
        first, now = self._first, self._now
        if (not self._live and time.perf_counter() - self._said < EVERY) or not first:
            return
        made, took = now["updates"] - first["updates"], now["at"] - first["at"]
        if made < 1 or took <= 0:
            return
        total, known = first.get("total"), self._known
        if total is None and known is not None:  # as many updates as that run made, or for as many samples
            total = known.updates + 1
            if now["samples"] and known.samples:
                total = round(known.samples / known.updates * total / now["samples"] * now["updates"])
        of = f" of {total:,}, {duration(max(0, total - now['updates']) * took / made)} left" if total else ""
        self.say(f"update {now['updates']:,}{of}, {rate(made / took)} updates/s")

    def _look(self) -> None:
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            file.seek(self._read)
            for text in file:
                if not text.endswith(b"\n"):  # it is being written
                    break
                self._read += len(text)
                line = json.loads(text)
                if line["event"] == "first":
                    self._first = self._now = line
                elif line["event"] == "memory":
                    self._now = line

    def say(self, words: str, last: bool = False) -> None:
        self._said = time.perf_counter()
        line, begin, end = f"{self._head}: {words}", "", "\n"
        if self._live:
            line, begin, end = line[: width() - 1], "\r\x1b[K", "\n" * last
        print(begin + line, end=end, file=sys.stderr, flush=True)


def words(found: Comparison) -> str:
    """The verdict and the table, for a terminal."""
    verdict, (shown, same) = found.verdict, columns(found)
    said = [paint(wrap(plain(verdict.sentence)), BOLD), ""]
    lines, colours = [["", *(column.head for column in shown)]], [BOLD]
    for i, summary in enumerate(found.summaries):
        cells = [column.cells[i] for column in shown]
        taken = summary.name == verdict.take
        lines.append([f"{'→' if taken else ' '} {summary.name}", *(text for text, _ in cells)])
        colours.append(GREEN if taken else "" if summary.speeds else RED)
        if any(below for _, below in cells):
            lines.append(["", *(below for _, below in cells)])
            colours.append(DIM)
    printed = table(lines, right=set(range(1, len(lines[0])))).splitlines()
    said += [paint(line, code) for line, code in zip(printed, colours)]
    for summary in found.summaries:
        said += [wrap(f"{plain(summary.name)} {plain(trouble)}", "  ") for trouble in summary.troubles]
    said += [wrap(plain(line)) for line in (same, *verdict.evidence, found.missing) if line]
    said += [paint(wrap(plain(line)), YELLOW) for line in verdict.doubts]
    return "\n".join(said)


def _words(text: str) -> list[str]:
    """Values with commas between them; one with commas in it stands in double quotes."""
    return [word.strip() for word in next(csv.reader([text], skipinitialspace=True), [])]


def _varied(text: str) -> tuple[str, list[str]]:
    name, equals, values = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=A,B")
    return "mixed_precision" if name == "precision" else name, _words(values) or [""]


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


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
        told = [
            (ratio(s.ratio), " … ".join(map(ratio, s.interval or ()))) if s.ratio else ("–", "")
            for s in standings
        ]
        shown.append(Column("ratio", told))
    known_times = {name: one.seconds for name, one in found.predicted.items() if one.seconds}
    if known_times:
        shown.append(Column("update", [_cell(plan.paces, duration) for plan in plans]))
        guesses = [(plan, known_times.get(plan.name)) for plan in plans]
        off = [f"× {ratio(middle(p.paces) / guess)}" if guess and p.paces else "" for p, guess in guesses]
        told = [duration(guess) if guess else "–" for _, guess in guesses]
        shown.append(Column("predicted", list(zip(told, off))))
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


# -- files


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
            "seconds_per_update": _spread(plan.paces),
            "predicted": one._asdict() if (one := found.predicted.get(plan.name)) else None,
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
    return _as_json({**about, **{name: getattr(found, name) for name in kept}, "plans": plans})


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    numbers = (len(values), middle(values), min(values), max(values)) if values else ()
    return dict(zip(("count", "median", "least", "most"), numbers)) or None


def _as_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        return {str(name): _as_json(held) for name, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(held) for held in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write(found: Comparison) -> tuple[list[Path], str]:
    """Write ``compare.json``, ``compare.html`` and ``compare.png`` to the folder."""
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
        said = {n: one for n, one in said.items() if not isinstance(one, list)}  # candidates
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
