"""Starts the checks on every rank, and makes one row a check of what the ranks found."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from ...launcher import launch_script
from .findings import PLAN, Finding, read


@dataclass(frozen=True)
class Row:
    """A check over all ranks.

    Attributes:
        outcome: "good", "bad" or "left out".
        seconds: of the rank that took longest.
        words: figures of rank 0, or why it is bad or was left out.
    """

    check: str
    outcome: str
    seconds: float
    words: str


@dataclass(frozen=True)
class Tried:
    """All rows, the plan as rank 0 explains it, and the launcher's exit code."""

    rows: list[Row]
    plan: str
    code: int

    @property
    def good(self) -> bool:
        return self.code == 0 and bool(self.rows) and all(row.outcome != "bad" for row in self.rows)


def try_out(processes: int) -> Tried:
    """Run all checks on `processes` ranks of this machine. What a rank that dies prints goes to stderr."""
    with tempfile.TemporaryDirectory(prefix="easymp-test-") as name:
        folder = Path(name)
        code = launch_script("easymp.cli.selftest", [name], processes, module=True)
        plan = folder / PLAN
        return Tried(
            rows(read(folder, processes)), plan.read_text(encoding="utf-8") if plan.exists() else "", code
        )


def rows(found: dict[int, list[Finding]]) -> list[Row]:
    """One a check, in the order in which ranks began them."""
    names = dict.fromkeys(finding.check for findings in found.values() for finding in findings)
    return [
        _row(name, {rank: [f for f in findings if f.check == name] for rank, findings in found.items()})
        for name in names
    ]


def _row(check: str, found: dict[int, list[Finding]]) -> Row:
    ends = {rank: findings[-1] for rank, findings in found.items() if findings}
    seconds = max((f.seconds for f in ends.values() if f.outcome != "begun"), default=0.0)
    bad = [(rank, f) for rank, f in ends.items() if f.outcome == "bad"]
    bad.sort(key=lambda entry: entry[1].second_hand)  # who waited in vain for another comes after that one
    gone = [rank for rank in found if rank not in ends or ends[rank].outcome == "begun"]
    many = len(found) > 1
    if gone and not (bad and not bad[0][1].second_hand):
        who = (
            f"rank {gone[0]} did not come"
            if len(gone) < len(found)
            else "no rank came"
            if many
            else "it did not come"
        )
        return Row(check, "bad", seconds, f"{who} to the end of it; what was printed above says why")
    if bad:
        rank, finding = bad[0]
        return Row(check, "bad", seconds, f"rank {rank}: {finding.words}" if many else finding.words)
    first = ends[min(ends)]
    return Row(check, first.outcome, seconds, first.words)
