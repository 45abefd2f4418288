"""Run a script under several plans, in turn, and show them side by side.

Time, memory, loss and accuracy of each: as a table, and as a page with plots.
SCRIPT needs an Accelerator, and acc.log({"loss": loss}) for curves; accuracy is
logged alike. Plans win over its own settings; each combination of those given
is one, and the others are compared with the first.

examples:
  easymp compare train.py --precision fp32,bf16
  easymp compare train.py --precision fp32,bf16,O1 --repeats 3 -- --epochs 2
  easymp compare train.py --strategy ddp,fsdp --processes 2
  easymp compare train.py --strategy ddp --processes 1,2 --metric val/f1

Words after -- are the script's own. Three runs of each plan or more can show
a difference of times; fewer are a hint. The folder --output gets the page
(compare.html, one file), a picture, a JSON and the raw records; page and
picture need matplotlib: pip install 'easymp[report]'.

Exit codes: 0 all runs finished; 1 one did not, and the table says why;
2 wrong usage; 130 interrupted, after showing the finished runs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from ...errors import SettingError
from ..terminal import BOLD, DIM, RED, YELLOW, paint, plain, table, wrap
from . import report
from .runs import INTERRUPTED, Task, Variant, read, variants
from .runs import run as run_once
from .summary import Run, heads, rows, seconds
from .verdict import Comparison, conclude


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "easymp compare SCRIPT [OPTIONS] [-- ARGUMENTS]"
    _options(parser)
    # PARSER is one word and all that follow it, as they are; SCRIPT and a REMAINDER would lose a "--" between them.
    words = "its path, and the script's own after --"
    parser.add_argument("script", nargs=argparse.PARSER, action=_Rest, metavar="SCRIPT", help=words)


class _Rest(argparse.Action):
    """The script, options of ours as far as ``--``, and the script's own arguments."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        script, *rest = values[1:] if values[0] == "--" and values[1:] else values
        cut = rest.index("--") if "--" in rest else len(rest)
        again = argparse.ArgumentParser(parser.prog, usage=parser.usage, allow_abbrev=False, add_help=False)
        _options(again)
        _, unknown = again.parse_known_args(rest[:cut], namespace)
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
    processes = "how many (one an accelerator, 1 without any)"
    add("--processes", type=_counts, default=[], metavar="N,M", help=processes)
    repeats = "number of runs of each, in rounds; medians are compared (1)"
    add("--repeats", type=_count, default=1, metavar="N", help=repeats)
    seed = "of the first round, one more in each that follows (the script's own)"
    add("--seed", type=int, metavar="N", help=seed)
    timeout = "stop a run that takes longer, and go on with the next"
    add("--timeout", type=float, metavar="SECONDS", help=timeout)
    metric = "compare this logged value (loss and accuracy); may be repeated"
    add("--metric", action="append", default=[], metavar="NAME", help=metric)
    output = "a new folder for the reports (easymp-compare-DATE)"
    add("--output", type=Path, metavar="DIR", help=output)
    add("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    add("--json", action="store_true", help="print all of it as JSON, in place of the table")


def run(args: argparse.Namespace) -> int:
    chosen = variants(args.precision, args.strategy, args.processes)
    if not args.module and not Path(args.script).is_file():
        raise SettingError(
            f"{args.script!r} is not a file: pass the script's path, or -m and a module's name"
        )
    folder = args.output or Path(time.strftime("easymp-compare-%Y%m%d-%H%M%S"))
    if folder.exists() and any(folder.iterdir()):
        raise SettingError(f"{str(folder)!r} is there, and not empty: name a new folder with --output")
    task = Task(args.script, args.arguments, args.module, args.timeout)
    # SIGTERM ends the running ranks as Ctrl-C does, and the finished runs are shown.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        found = compare(task, chosen, folder.absolute(), args.repeats, args.seed, args.metric)
    finally:
        signal.signal(signal.SIGTERM, before)
    written, trouble = report.write(found)
    print(json.dumps(report.as_json(found), indent=2) if args.json else words(found))
    near = [os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path) for path in written]
    print("\nwrote " + "\n      ".join(near), file=sys.stderr if args.json else sys.stdout)
    if trouble:
        print(wrap(trouble), file=sys.stderr)
    return 130 if found.interrupted else int(found.failed)


def compare(
    task: Task,
    chosen: Sequence[Variant],
    folder: Path,
    repeats: int,
    seed: int | None,
    metrics: Sequence[str],
) -> Comparison:
    """Run `task` under each of `chosen`, round by round, so that changes of the machine's load meet all of them.

    A run that fails does not stop the others. After an interruption, the finished runs are kept.

    Args:
        folder: gets a folder a run, and in each the project's, so that no run resumes another.
        seed: of the first round; each round counts one up. None leaves it to the script.
        metrics: names of logged values to compare; none: loss and accuracy, or all of a few.
    """
    runs: list[Run] = []
    for number, (index, variant) in product(range(1, repeats + 1), enumerate(chosen, 1)):
        again = f", run {number} of {repeats}" if repeats > 1 else ""
        head = f"{len(runs) + 1}/{len(chosen) * repeats} {plain(variant.name)}{again} …"
        print(head, end=" ", file=sys.stderr, flush=True)
        safe = "".join(x if x.isascii() and x.isalnum() else "-" for x in variant.name)
        place = folder / "runs" / f"{index}-{safe}-{number}"
        its_seed = None if seed is None else seed + number - 1
        end = run_once(task, variant, place, its_seed)
        print(f"{end.status} after {seconds(end.wall)}", file=sys.stderr, flush=True)
        runs.append(Run(variant, number, its_seed, end, read(place)))
        if end.status == INTERRUPTED:
            break
    interrupted = runs[-1].end.status == INTERRUPTED
    return conclude(task, chosen, runs, folder, repeats=repeats, metrics=metrics, interrupted=interrupted)


def words(found: Comparison) -> str:
    """The table and the verdict, for a terminal."""
    lines, colours = [["", *heads(found.summaries, found.metrics)]], [BOLD]
    for summary, cells in zip(found.summaries, rows(found.summaries, found.metrics)):
        lines.append([summary.name, *(text for text, _ in cells)])
        colours.append("" if summary.finished else RED)
        if any(below for _, below in cells):
            lines.append(["", *(below for _, below in cells)])
            colours.append(DIM)
    printed = table(lines, right=set(range(1, len(lines[0])))).splitlines()
    said = [paint(line, code) for line, code in zip(printed, colours)]
    for summary in found.summaries:
        said += [wrap(f"{plain(summary.name)} {plain(trouble)}", "  ") for trouble in summary.troubles]
    if found.missing:
        records = [run.record for summary in found.summaries for run in summary.runs if run.record]
        logged = sorted({name for record in records for name in record.curves})
        names = ", ".join(map(plain, logged)) or "nothing, so the script calls no acc.log"
        said.append(wrap(f"No run logged {', '.join(map(plain, found.missing))}. Logged: {names}."))
    said += ["", paint(wrap(plain(found.verdict.sentence)), BOLD)]
    said += [wrap(plain(line)) for line in found.verdict.evidence]
    said += [paint(wrap(plain(line)), YELLOW) for line in found.verdict.doubts]
    return "\n".join(said)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _counts(text: str) -> list[int]:
    return [_count(word) for word in _words(text)]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
