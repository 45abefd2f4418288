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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import hardware
from ..launcher import launch_script
from ..launcher.entrypoints import default_processes
from ..settings import resolve_launching
from .terminal import GREEN, RED, paint, print_json, table

MARKS = {"good": "good", "bad": "BAD", "left out": "–"}


class Row(NamedTuple):
    """The outcome of a check over all ranks."""

    check: str
    outcome: str  # "good", "bad" or "left out"
    seconds: float  # of the slowest rank
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
    outcomes: list[dict[str, dict[str, Any]]] = []
    for rank in range(processes):
        lines = map(json.loads, texts.get(f"rank-{rank}.jsonl", "").splitlines())
        outcomes.append({line["check"]: line for line in lines})  # the end of a check replaces its beginning
    checks = dict.fromkeys(check for by_check in outcomes for check in by_check)
    rows = [combine(check, [by_check.get(check) for by_check in outcomes]) for check in checks]
    return rows, texts.get("plan.txt", ""), code


def combine(check: str, outcomes: Sequence[dict[str, Any] | None]) -> Row:
    """The row of a check from the outcome on each rank; None for a rank that ended before it."""
    seconds = max(outcome["seconds"] for outcome in outcomes if outcome)
    failures = [
        (o["peer_failed"], rank, o["message"]) for rank, o in enumerate(outcomes) if o and o["outcome"] == "bad"
    ]
    died = [rank for rank, outcome in enumerate(outcomes) if not outcome or outcome["outcome"] == "begun"]
    if died and all(peer_failed for peer_failed, _, _ in failures):
        subject = "no rank came" if len(died) == len(outcomes) else f"rank {died[0]} did not come"
        return Row(check, "bad", seconds, f"{subject} to the end of it; the output above says why")
    if failures:
        _, rank, message = min(failures)  # the failure of a rank before those of ranks that waited for it
        return Row(check, "bad", seconds, f"rank {rank}: {message}" if len(outcomes) > 1 else message)
    outcome = next(outcome for outcome in outcomes if outcome)
    return Row(check, outcome["outcome"], seconds, outcome["message"])
