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
SEE = "what was printed above says why"


@dataclass(frozen=True)
class Row:
    """A check over all ranks."""

    check: str
    outcome: str  # "good", "bad" or "left out"
    seconds: float  # of the rank that took longest
    words: str  # figures of rank 0, or why it is bad or was left out


@dataclass(frozen=True)
class Result:
    """All rows, the plan as rank 0 explains it, and the launcher's exit code."""

    rows: list[Row]
    plan: str
    code: int

    @property
    def good(self) -> bool:
        return self.code == 0 and bool(self.rows) and all(row.outcome != "bad" for row in self.rows)


def arguments(parser: argparse.ArgumentParser) -> None:
    words = "how many (easymp.toml's; else one an accelerator, or 2 without any)"
    parser.add_argument("--processes", type=int, metavar="N", help=words)
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    processes = resolve_launching(processes=args.processes).processes
    if processes is None:  # one process alone has no collectives, and two CPU processes need only a CPU
        processes = max(default_processes(), 1 if hardware.detect().devices else 2)
    result = run_checks(processes)
    if args.json:
        print_json({**dataclasses.asdict(result), "good": result.good})
    else:
        print(told(result, processes))
    return 0 if result.good else 1


def run_checks(processes: int) -> Result:
    """Run all checks on `processes` ranks of this machine. What a rank that dies prints goes to stderr."""
    with tempfile.TemporaryDirectory(prefix="easymp-test-") as name:
        folder = Path(name)
        code = launch_script(f"{__package__}.selftest", [name], processes, module=True)
        found: dict[int, list[dict[str, Any]]] = {}
        for rank in range(processes):
            path = folder / f"rank-{rank}.jsonl"
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            found[rank] = [json.loads(line) for line in lines]
        plan = folder / "plan.txt"
        return Result(rows(found), plan.read_text(encoding="utf-8") if plan.exists() else "", code)


def rows(found: dict[int, list[dict[str, Any]]]) -> list[Row]:
    """One a check, in the order in which ranks began them; `found` are the findings of each rank."""
    names = dict.fromkeys(finding["check"] for findings in found.values() for finding in findings)
    made = []
    for name in names:
        of_check = {rank: [f for f in findings if f["check"] == name] for rank, findings in found.items()}
        made.append(
            _row(name, {rank: findings[-1] for rank, findings in of_check.items() if findings}, len(found))
        )
    return made


def _row(check: str, last: dict[int, dict[str, Any]], ranks: int) -> Row:
    """A check by the last finding of each rank that has one."""
    seconds = max(finding["seconds"] for finding in last.values())
    bad = [rank for rank, finding in last.items() if finding["outcome"] == "bad"]
    bad.sort(
        key=lambda rank: last[rank]["second_hand"]
    )  # a rank that waited for another comes after that one
    gone = [rank for rank in range(ranks) if rank not in last or last[rank]["outcome"] == "begun"]
    if gone and (not bad or last[bad[0]]["second_hand"]):
        who = f"rank {gone[0]}" if len(gone) < ranks else "no rank" if ranks > 1 else "it"
        verb = "came" if who == "no rank" else "did not come"
        return Row(check, "bad", seconds, f"{who} {verb} to the end of it; {SEE}")
    if bad:
        words = last[bad[0]]["words"]
        return Row(check, "bad", seconds, f"rank {bad[0]}: {words}" if ranks > 1 else words)
    first = last[min(last)]
    return Row(check, first["outcome"], seconds, first["words"])


def told(result: Result, processes: int) -> str:
    """The plan, a table of the checks with a sentence for each that failed, and the verdict."""
    lines = [["check", "", "seconds", ""]]
    for row in result.rows:
        words = "see below" if row.outcome == "bad" else row.words
        lines.append([row.check, MARKS[row.outcome][0], f"{row.seconds:.1f}", words])
    said = [result.plan, ""]
    marks = {row.check: MARKS[row.outcome] for row in result.rows}
    for line in table(lines, right={2}, fold=True).splitlines():
        mark, colour = marks.get(line.split(" ")[0], ("", ""))
        said.append(line.replace(f" {mark} ", f" {paint(mark, colour)} ", 1) if colour else line)
    bad = [row for row in result.rows if row.outcome == "bad"]
    said += [""] * bool(bad) + [wrap(f"{row.check}: {row.words}", "  ") for row in bad]
    if result.good:
        verdict = f"all is well on {processes} process{'es' * (processes > 1)}"
    elif bad:
        verdict = f"{len(bad)} of {len(result.rows)} checks failed"
    else:
        verdict = f"the ranks ended with exit code {result.code}; what they printed says why"
    return "\n".join([*said, "", verdict]).lstrip("\n")
