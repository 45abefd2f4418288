"""Train something small on this machine, and compare the results with the known answers.

The plan's precision and strategy run a training under every rank; collectives, the speed between ranks, each precision against fp32,
a checkpoint written and read back, and the kernels where they run.

examples:
  easymp test                  one process an accelerator; two without any
  easymp test --processes 4    four
  easymp test --json           for programs

Exit codes: 0 all checks are good; 1 something is not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import hardware
from ..launcher import launch_script
from ..launcher.entrypoints import default_processes
from ..settings import resolve_launching
from .terminal import GREEN, RED, paint, print_json, table, wrap

MARKS = {"good": ("good", GREEN), "bad": ("BAD", RED), "left out": ("–", "")}


@dataclass(frozen=True)
class Row:
    """A check over all ranks."""

    check: str
    outcome: str  # "good", "bad" or "left out"
    seconds: float  # of the rank that took longest
    words: str  # figures of rank 0, or why it is bad or was left out


def arguments(parser: argparse.ArgumentParser) -> None:
    words = "how many (easymp.toml's; else one an accelerator, or 2 without any)"
    parser.add_argument("--processes", type=int, metavar="N", help=words)
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    processes = resolve_launching(processes=args.processes).processes
    if processes is None:  # one process alone has no collectives, and two CPU processes need only a CPU
        processes = max(default_processes(), 1 if hardware.detect().devices else 2)
    found, plan, code = run_checks(processes)
    good = code == 0 and bool(found) and all(row.outcome != "bad" for row in found)
    if args.json:
        rows = [dataclasses.asdict(row) for row in found]
        print_json({"rows": rows, "plan": plan, "code": code, "good": good})
    else:
        print(told(found, plan, code, processes))
    return 0 if good else 1


def run_checks(processes: int) -> tuple[list[Row], str, int]:
    """The checks on `processes` ranks of this machine, the plan as rank 0 explains it, and the launcher's exit code."""
    with tempfile.TemporaryDirectory(prefix="easymp-test-") as name:
        folder = Path(name)
        code = launch_script(f"{__package__}.selftest", [name], processes, module=True)
        found: list[dict[str, dict[str, Any]]] = [{} for _ in range(processes)]
        for rank, findings in enumerate(found):
            path = folder / f"rank-{rank}.jsonl"
            for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
                finding = json.loads(line)
                findings[finding["check"]] = finding  # the last one counts
        plan = folder / "plan.txt"
        names = dict.fromkeys(name for findings in found for name in findings)
        rows = [combined(name, [findings.get(name) for findings in found]) for name in names]
        return rows, plan.read_text(encoding="utf-8") if plan.exists() else "", code


def combined(check: str, last: list[dict[str, Any] | None]) -> Row:
    """A check by the last finding of each rank; None for a rank that did not come so far."""
    seconds = max(finding["seconds"] for finding in last if finding)
    bad = [(f["second_hand"], rank, f) for rank, f in enumerate(last) if f and f["outcome"] == "bad"]
    gone = [rank for rank, finding in enumerate(last) if not finding or finding["outcome"] == "begun"]
    if gone and all(second_hand for second_hand, _, _ in bad):  # which failed because another rank was gone
        lost = "no rank came" if len(gone) == len(last) else f"rank {gone[0]} did not come"
        return Row(check, "bad", seconds, f"{lost} to the end of it; the output above says why")
    if bad:
        _, rank, finding = min(bad, key=lambda one: one[:2])
        who = f"rank {rank}: " if len(last) > 1 else ""
        return Row(check, "bad", seconds, who + finding["words"])
    first = next(finding for finding in last if finding)
    return Row(check, first["outcome"], seconds, first["words"])


def told(found: list[Row], plan: str, code: int, processes: int) -> str:
    """The plan, a table of the checks with a sentence for each that failed, and the verdict."""
    lines = [["check", "", "seconds", ""]]
    for row in found:
        words = "see below" if row.outcome == "bad" else row.words
        lines.append([row.check, MARKS[row.outcome][0], f"{row.seconds:.1f}", words])
    said, marks = [plan, ""], {row.check: MARKS[row.outcome] for row in found}
    for line in table(lines, right={2}, fold=True).splitlines():
        mark, colour = marks.get(line.split(" ")[0], ("", ""))
        said.append(line.replace(f" {mark} ", f" {paint(mark, colour)} ", 1) if colour else line)
    bad = [row for row in found if row.outcome == "bad"]
    said += [""] * bool(bad) + [wrap(f"{row.check}: {row.words}", "  ") for row in bad]
    verdict = f"all is well on {processes} process{'es' * (processes > 1)}"
    if bad:
        verdict = f"{len(bad)} of {len(found)} checks failed"
    elif code or not found:
        verdict = f"the ranks ended with exit code {code}; their output above says why"
    return "\n".join([*said, "", verdict]).lstrip("\n")
