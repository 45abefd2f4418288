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
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from ...base import env
from ...base.units import duration, rate
from ...errors import SettingError
from ...settings import overrides, read_pairs
from ..terminal import BOLD, DIM, GREEN, RED, YELLOW, paint, plain, table, width, wrap
from . import report
from .runs import FINISHED, INTERRUPTED, Record, Task, Variant, read, variants
from .runs import run as run_once
from .summary import Run, is_run, load
from .verdict import Comparison, conclude

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
    precisions = "of fp32, tf32, bf16, fp16, fp8, bf16-true, fp16-true, O0 to O3, auto (the script's own)"
    add("--precision", **several, metavar="A,B", help=precisions)
    add("--strategy", **several, metavar="A,B", help="of single, ddp, zero1, fsdp … (the script's own)")
    add("--processes", **several, metavar="N,M", help="how many (one an accelerator, 1 without any)")
    vary = (
        "values of any setting, such as gradient_accumulation_steps=1,4 or strategy_options.OPTION=A,B; or of {NAME} among the "
        "script's own arguments; may be repeated"
    )
    add("--vary", action="append", type=_varied, default=[], metavar="NAME=A,B", help=vary)
    sets = "a setting of all plans, over the script's own; may be repeated"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=sets)
    repeats = "number of runs of each, in rounds; medians are compared (1)"
    add("--repeats", type=_count, default=1, metavar="N", help=repeats)
    seed = "of the first round, one more in each that follows (the script's own)"
    add("--seed", type=int, metavar="N", help=seed)
    timeout = "stop a run that takes longer, and go on with the next"
    add("--timeout", type=float, metavar="SECONDS", help=timeout)
    metric = "compare this logged value (loss and accuracy); may be repeated"
    add("--metric", action="append", default=[], metavar="NAME", help=metric)
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
    if not args.runs and not args.module and not Path(args.script).is_file():
        raise SettingError(
            f"{args.script!r} is not a file: pass the script's path, or -m and a module's name"
        )
    if folder.exists() and any(folder.iterdir()):
        raise SettingError(f"{str(folder)!r} is there, and not empty: name a new folder with --output")
    if args.runs:
        found = conclude(None, load(args.runs), folder.absolute(), args.metric)
        folder.mkdir(parents=True, exist_ok=True)
    else:
        chosen = variants(dict(varied), args.arguments)
        task = Task(args.script, args.arguments, args.module, args.timeout)
        # SIGTERM ends the running ranks as Ctrl-C does, and the finished runs are shown.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            with env.override(**overrides(args.set)):
                found = compare(task, chosen, folder.absolute(), args)
        finally:
            signal.signal(signal.SIGTERM, before)
    written, trouble = report.write(found)
    print(json.dumps(report.as_json(found), indent=2) if args.json else words(found))
    near = [os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path) for path in written]
    print("\nwrote " + "\n      ".join(near), file=sys.stderr if args.json else sys.stdout)
    if trouble:
        print(wrap(trouble), file=sys.stderr)
    return 130 if found.interrupted else int(any(plan.troubles for plan in found.summaries))


def compare(task: Task, chosen: Sequence[Variant], folder: Path, args: argparse.Namespace) -> Comparison:
    """Run `task` under each of `chosen`, round by round, so that changes of the machine's load meet all of them.

    A run that fails does not stop the others. After an interruption, the finished runs are kept. `folder` gets a folder a run, and in
    each the project's, so that no run resumes another.
    """
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
    verdict, (columns, same) = found.verdict, report.columns(found)
    said = [paint(wrap(plain(verdict.sentence)), BOLD), ""]
    lines, colours = [["", *(column.head for column in columns)]], [BOLD]
    for i, summary in enumerate(found.summaries):
        cells = [column.cells[i] for column in columns]
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


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
