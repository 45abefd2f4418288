"""Run a script under several plans, in turn, and show them side by side.

Time, memory, loss and accuracy of each: as a table, and as a page with plots.
SCRIPT needs an Accelerator, and acc.log({"loss": loss}) for curves; accuracy is
logged alike. Plans win over its own settings; each combination of those given
is one, and the first is what the others are compared with.

examples:
  easymp compare train.py --precision fp32,bf16
  easymp compare train.py --precision fp32,bf16,O1 --repeats 3 -- --epochs 2
  easymp compare train.py --strategy ddp,fsdp --processes 2
  easymp compare train.py --strategy ddp --processes 1,2 --metric val/f1

What follows -- is the script's own. Three runs of each plan or more can show
a difference of times; fewer are a hint. The folder --output gets the page
(compare.html, one file), a picture, a JSON and the raw records; page and
picture need matplotlib: pip install 'easymp[report]'.

Exit codes: 0 all runs finished; 1 one did not, and the table says why;
2 wrong usage; 130 interrupted, with what was done until then.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ..comparing import (
    Comparison,
    Run,
    Task,
    Variant,
    compare,
    heads,
    rows,
    seconds,
    variants,
    write_json,
    write_report,
)
from ..errors import SettingError
from .terminal import BOLD, DIM, RED, YELLOW, paint, plain, table, wrap


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "easymp compare SCRIPT [OPTIONS] [-- ARGUMENTS]"
    _options(parser)
    # PARSER is one word and all that follow it, as they are; SCRIPT and a REMAINDER would lose a "--" between them.
    parser.add_argument(
        "script",
        nargs=argparse.PARSER,
        action=_Rest,
        metavar="SCRIPT",
        help="its path, and the script's own after --",
    )


class _Rest(argparse.Action):
    """The script, options of ours as far as ``--``, and the script's own arguments."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
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
    add = parser.add_argument
    add(
        "--precision",
        type=_words,
        default=[],
        metavar="A,B",
        help="of fp32, tf32, bf16, fp16, fp8, bf16-true, fp16-true, O0 to O3, auto (the script's own)",
    )
    add(
        "--strategy",
        type=_words,
        default=[],
        metavar="A,B",
        help="of single, ddp, zero1, fsdp … (the script's own)",
    )
    add(
        "--processes",
        type=_numbers,
        default=[],
        metavar="N,M",
        help="how many (one an accelerator, 1 without any)",
    )
    add(
        "--repeats",
        type=_count,
        default=1,
        metavar="N",
        help="run each so often, in rounds, and compare medians (1)",
    )
    add(
        "--seed",
        type=int,
        metavar="N",
        help="of the first round, one more in each that follows (the script's own)",
    )
    add(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="stop a run that takes longer, and go on with the next",
    )
    add(
        "--metric",
        action="append",
        default=[],
        metavar="NAME",
        help="compare this logged value (loss and accuracy); may be repeated",
    )
    add("--output", type=Path, metavar="DIR", help="a new folder for the reports (easymp-compare-DATE)")
    add("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    add("--json", action="store_true", help="print all of it as JSON, in place of the table")


def run(args: argparse.Namespace) -> int:
    chosen = variants(args.precision, args.strategy, args.processes)
    if not args.module and not Path(args.script).is_file():
        raise SettingError(f"{args.script!r} is no file: pass the script's path, or -m and a module's name")
    folder = args.output or Path(time.strftime("easymp-compare-%Y%m%d-%H%M%S"))
    if folder.exists() and any(folder.iterdir()):
        raise SettingError(f"{str(folder)!r} is there, and not empty: name a new folder with --output")
    folder = folder.absolute()
    task = Task(args.script, args.arguments, args.module, args.timeout)
    total = len(chosen) * args.repeats
    told = _Telling(total, args.repeats)
    before = signal.signal(
        signal.SIGTERM, _interrupt
    )  # it ends the running ranks, too, and what is done is shown
    try:
        found = compare(
            task, chosen, folder, repeats=args.repeats, seed=args.seed, metrics=args.metric, tell=told
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    written = [write_json(found)]
    trouble = write_report(found, written)
    print(
        json.dumps(json.loads(written[0].read_text(encoding="utf-8")), indent=2)
        if args.json
        else words(found)
    )
    out = sys.stderr if args.json else sys.stdout
    print(
        "\n" + "\n".join(f"{'wrote' if i == 0 else '     '} {_near(path)}" for i, path in enumerate(written)),
        file=out,
    )
    if trouble:
        print(wrap(trouble), file=sys.stderr)
    return 130 if found.interrupted else int(found.failed)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def words(found: Comparison) -> str:
    """The table and the verdict, for a terminal."""
    lines = [["", *heads(found.summaries, found.metrics)[1:]]]
    colours = []
    for row in rows(found.summaries, found.metrics):
        lines.append([row.summary.name, *(cell.text for cell in row.cells)])
        colours.append("" if row.summary.finished else RED)
        if any(cell.below for cell in row.cells):
            lines.append(["", *(cell.below for cell in row.cells)])
            colours.append(DIM)
    head, *body = table(lines, right=set(range(1, len(lines[0])))).splitlines()
    said = [paint(head, BOLD), *(paint(line, code) if code else line for line, code in zip(body, colours))]
    for row in rows(found.summaries, found.metrics):
        said += [wrap(f"{plain(row.summary.name)} {plain(trouble)}", "  ") for trouble in row.troubles]
    if found.missing:
        said.append(wrap(f"No run logged {', '.join(map(plain, found.missing))}. Logged: {logged(found)}."))
    said += ["", paint(wrap(plain(found.verdict.sentence)), BOLD)]
    said += [wrap(plain(line)) for line in found.verdict.evidence]
    said += [paint(wrap(plain(line)), YELLOW) for line in found.verdict.doubts]
    return "\n".join(said)


def logged(found: Comparison) -> str:
    names = {
        name
        for summary in found.summaries
        for run in summary.runs
        if run.record
        for name in run.record.curves
    }
    return ", ".join(map(plain, sorted(names))) or "nothing, so the script calls no acc.log"


class _Telling:
    """A line a run on stderr, as it begins and ends."""

    def __init__(self, total: int, repeats: int) -> None:
        self._total, self._repeats, self._done = total, repeats, 0

    def __call__(self, variant: Variant, number: int, run: Run | None) -> None:
        if run is None:
            self._done += 1
            again = f", run {number} of {self._repeats}" if self._repeats > 1 else ""
            print(
                f"{self._done}/{self._total} {plain(variant.name)}{again} …",
                end=" ",
                file=sys.stderr,
                flush=True,
            )
        else:
            print(f"{run.end.status} after {seconds(run.end.wall)}", file=sys.stderr, flush=True)


def _near(path: Path) -> str:
    """`path` as short as it can be said from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str) -> list[int]:
    return [_count(word) for word in _words(text)]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)
