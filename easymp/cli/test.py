"""Train something small on this machine, and compare the results with the known answers.

The plan's precision and strategy run a training under every rank; collectives, the speed between ranks, each precision
against fp32, a checkpoint written and read back, and the kernels where they run.

examples:
  easymp test                  one process an accelerator; two without any
  easymp test --processes 4    four
  easymp test --json           for programs

Exit codes: 0 all checks are good; 1 a check failed; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import NamedTuple

from .. import hardware
from ..launcher import launch_script
from ..launcher.entrypoints import default_processes
from ..settings import resolve_launching
from .terminal import GREEN, RED, paint, print_json, table

MARKS = {"good": "good", "bad": "BAD", "left out": "–"}
BEGUN = "begun"  # the outcome of a check that runs
ROWS, PLAN = "rows.jsonl", "plan.txt"  # files of the ranks


class Row(NamedTuple):
    """The outcome of a check over all ranks."""

    check: str
    outcome: str  # "good", "bad" or "left out"
    seconds: float  # on rank 0
    message: str  # figures of rank 0, or why it is bad or was left out


def arguments(parser: argparse.ArgumentParser) -> None:
    default = "easymp.toml's; else one an accelerator, or 2 without any"
    parser.add_argument("--processes", type=int, metavar="N", help=f"how many ({default})")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    processes = resolve_launching(processes=args.processes).processes
    if processes is None:  # one process alone has no collectives, and two CPU processes need only a CPU
        processes = max(default_processes(), 1 if hardware.detect().devices else 2)
    rows, plan, code = run_checks(processes)
    failed = [row for row in rows if row.outcome == "bad"]
    success = code == 0 and bool(rows) and not failed
    if args.json:
        print_json({"rows": [row._asdict() for row in rows], "plan": plan, "code": code, "good": success})
        return int(not success)
    verdict = f"all is well on {processes} process{'es' * (processes > 1)}"
    if failed:
        verdict = f"{len(failed)} of {len(rows)} checks failed"
    elif not success:
        verdict = f"the ranks ended with exit code {code}; their output above says why"
    cells = [[row.check, MARKS[row.outcome], f"{row.seconds:.1f}", row.message] for row in rows]
    print(f"{plan}\n\n{table([['check', '', 'seconds', ''], *cells], right={2}, fold=True)}\n".lstrip("\n"))
    print(paint(verdict, GREEN if success else RED))
    return int(not success)


def run_checks(processes: int) -> tuple[list[Row], str, int]:
    """The checks on `processes` ranks of this machine, the plan as rank 0 explains it, and the launcher's exit code."""
    with tempfile.TemporaryDirectory(prefix="easymp-test-") as scratch:
        code = launch_script(f"{__package__}.selftest", [scratch], processes, module=True)
        texts = {path.name: path.read_text(encoding="utf-8") for path in Path(scratch).iterdir() if path.is_file()}
    rows = [Row(*json.loads(line)) for line in texts.get(ROWS, "").splitlines()]
    by_check = {row.check: row for row in rows}  # the outcome of a check replaces its begin
    died = "a rank ended before the end of it; the output above says why"
    rows = [row._replace(outcome="bad", message=died) if row.outcome == BEGUN else row for row in by_check.values()]
    return rows, texts.get(PLAN, ""), code
