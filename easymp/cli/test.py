"""Train something small on this machine, and compare what comes out with what must come out.

The plan's precision and strategy run a training under every rank; collectives, the speed between ranks, each precision against fp32,
a checkpoint's way out and back, and the kernels where there are any.

examples:
  easymp test                  one process an accelerator; two without any
  easymp test --processes 4    four
  easymp test --json           for programs

Exit codes: 0 all that was checked is good; 1 something is not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from .. import hardware
from ..launcher.entrypoints import default_processes
from ..settings import resolve_launching
from .selftest import Tried, try_out
from .terminal import GREEN, RED, paint, table, wrap

MARKS = {"good": ("good", GREEN), "bad": ("BAD", RED), "left out": ("–", "")}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="how many (easymp.toml's; else one an accelerator, or 2 without any)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    processes = resolve_launching(processes=args.processes).processes
    if (
        processes is None
    ):  # one process alone has no collectives, and two CPU processes need no more than a CPU
        processes = max(default_processes(), 1 if hardware.detect().devices else 2)
    tried = try_out(processes)
    print(
        json.dumps({**dataclasses.asdict(tried), "good": tried.good}, indent=2)
        if args.json
        else told(tried, processes)
    )
    return 0 if tried.good else 1


def told(tried: Tried, processes: int) -> str:
    """The plan, a table of the checks with a sentence for each that failed, and the verdict."""
    rows = [["check", "", "seconds", ""]]
    for row in tried.rows:
        words = "see below" if row.outcome == "bad" else row.words
        rows.append([row.check, MARKS[row.outcome][0], f"{row.seconds:.1f}", words])
    lines = [tried.plan, "", *_coloured(table(rows, right={2}, fold=True), tried)]
    bad = [row for row in tried.rows if row.outcome == "bad"]
    lines += [""] * bool(bad) + [wrap(f"{row.check}: {row.words}", "  ") for row in bad]
    if tried.good:
        verdict = f"all is well on {processes} process{'es' * (processes > 1)}"
    elif bad:
        verdict = f"{len(bad)} of {len(tried.rows)} checks failed"
    else:
        verdict = f"the ranks ended with exit code {tried.code}; what they printed says why"
    return "\n".join([*lines, "", verdict]).lstrip("\n")


def _coloured(text: str, tried: Tried) -> list[str]:
    """The table's lines, with each outcome in its colour."""
    lines = []
    by_name = {row.check: MARKS[row.outcome] for row in tried.rows}
    for line in text.splitlines():
        mark, colour = by_name.get(line.split(" ")[0], ("", ""))
        lines.append(line.replace(f" {mark} ", f" {paint(mark, colour)} ", 1) if colour else line)
    return lines
