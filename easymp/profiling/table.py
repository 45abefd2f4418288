"""The table of a profile, and what it says in words: each sentence has its figure in the table."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.units import size
from .breakdown import Breakdown
from .phases import COMMUNICATION, DATA, OPTIMIZER, OTHER, PHASES

ROWS = 8  # ranks that have a line of their own

# From which share of a step on a cause of waiting is worth a sentence.
WAITS = 0.1
COMMUNICATES = 0.15
IDLES = 0.25
STEPS = 0.25
SCRIPT = 0.25
APART = 0.1  # of a step, by which ranks differ
UNLIKE = 2  # times the shortest step


def ms(ns: float) -> str:
    return f"{ns / 1e6:.1f} ms" if ns >= 1e5 else f"{ns / 1e3:.0f} µs"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def table(own: Breakdown) -> str:
    """One rank's phases: ms a step, share, of it the device idle, the most memory."""
    head = ["phase", "ms a step", "share"]
    if own.idle:
        head.append(f"{own.device} idle")
    if own.peak:
        head.append("peak memory")
    rows = [head]
    for phase in PHASES:
        if own.time.get(phase, 0) or own.peak.get(phase, 0):
            row = [phase, f"{own.each(phase) / 1e6:.2f}", percent(own.share(phase))]
            if own.idle:
                row.append(f"{own.idle.get(phase, 0) / max(1, len(own.steps)) / 1e6:.2f}")
            if own.peak:
                row.append(size(own.peak[phase]) if phase in own.peak else "")
            rows.append(row)
    last = ["a step", f"{own.step / 1e6:.2f}", "100 %"]
    if own.idle:
        last.append(f"{sum(own.idle.values()) / max(1, len(own.steps)) / 1e6:.2f}")
    if own.peak:
        last.append(size(max(own.peak.values())))
    return columns([*rows, last])


def of_ranks(ranks: Sequence[Breakdown]) -> str:
    """A line a rank; of many ranks the slowest, and the fastest."""
    rows = [["rank", "ms a step", "own work", "communication", "data wait"]]
    by_work = sorted(ranks, key=lambda r: -r.own)
    shown = (
        list(ranks)
        if len(ranks) <= ROWS
        else sorted([*by_work[: ROWS - 1], by_work[-1]], key=lambda r: r.rank)
    )
    for r in shown:
        rows.append(
            [str(r.rank), *(f"{ns / 1e6:.2f}" for ns in (r.step, r.own, r.each(COMMUNICATION), r.each(DATA)))]
        )
    if len(shown) < len(ranks):
        rows.append([f"and {len(ranks) - len(shown)} more", "", "", "", ""])
    return columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:]))]
        ).rstrip()
        for row in rows
    )


def sentences(own: Breakdown, ranks: Sequence[Breakdown] = (), workers: int | None = None) -> list[str]:
    """What stands out.

    Args:
        ranks: all that took part.
        workers: num_workers of the loaders; None: none was read.
    """
    if not own.total:
        return []
    biggest = max(own.time, key=own.time.__getitem__)
    said = [f"{percent(own.share(biggest))} of the step is {_named(biggest)}."]
    if own.share(DATA) >= WAITS:
        cure = (
            "num_workers=2 or more reads ahead while the step computes"
            if not workers
            else f"more workers (num_workers={workers} now) or less work a sample would help"
        )
        said.append(f"The loader makes the step wait {ms(own.each(DATA))}: {cure}.")
    if own.share(COMMUNICATION) >= COMMUNICATES:
        behind = own.hidden / max(1, len(own.steps))
        more = f"; {ms(behind)} more of it pass behind computation" if behind >= 0.01 * own.step else ""
        said.append(
            f"Communication, with waiting for other ranks, holds the step up for {ms(own.each(COMMUNICATION))}{more}: with larger "
            "batches a rank, or accumulation, fewer steps pay for it."
        )
    idle = sum(own.idle.values())
    if idle >= IDLES * own.total:
        phase = max(own.idle, key=own.idle.__getitem__)
        said.append(
            f"{own.device} is idle for {ms(idle / max(1, len(own.steps)))} of the step, the most in {_named(phase)}: the host does not "
            "keep it busy; larger batches or compile=True give it more to do at a time."
        )
    if own.share(OPTIMIZER) >= STEPS:
        said.append(
            f"The optimizer takes {ms(own.each(OPTIMIZER))}, whatever the batch: larger batches or accumulation step less often."
        )
    if own.share(OTHER) >= SCRIPT:
        said.append(
            f"{ms(own.each(OTHER))} of the step are none of these: the script's own work between them, such as logging."
        )
    if min(own.steps) * UNLIKE < max(own.steps):
        said.append(
            f"The steps are not alike: the longest took {ms(max(own.steps))}, the shortest {ms(min(own.steps))}."
        )
    return [*said, *straggler(ranks)]


def straggler(ranks: Sequence[Breakdown]) -> list[str]:
    """Who the others wait for, if anyone."""
    if len(ranks) < 2:
        return []
    slow, fast = max(ranks, key=lambda r: r.own), min(ranks, key=lambda r: r.own)
    if slow.own - fast.own < APART * slow.step:
        return []
    why = " (its loader)" if slow.each(DATA) - fast.each(DATA) > (slow.own - fast.own) / 2 else ""
    work = f"{ms(slow.own)} of work of its own a step, rank {fast.rank} only {ms(fast.own)}"
    return [f"Rank {slow.rank} is the slowest{why}: {work}: the others wait for it."]


def _named(phase: str) -> str:
    return {OTHER: "the script's own", COMMUNICATION: "communication"}.get(phase, phase)


def how_long(steps: Sequence[int]) -> str:
    """``"3 steps of 91.2, 92.0 and 90.8 ms"``."""
    thousands = max(steps) < 1e6
    each = [f"{ns / (1e3 if thousands else 1e6):.1f}" for ns in steps]
    unit = "µs" if thousands else "ms"
    if len(each) == 1:
        return f"1 step of {each[0]} {unit}"
    if len(each) > 5:
        return f"{len(each)} steps of {min(each, key=float)} to {max(each, key=float)} {unit}"
    return f"{len(each)} steps of {', '.join(each[:-1])} and {each[-1]} {unit}"
