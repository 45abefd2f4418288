"""The verdict on all runs: which plan to take, and how sure that is. Terminal, page, picture and JSON show this one.

The speeds of two plans differ where the 90 % interval of their ratio excludes 1. It is the interval of the exact rank test (Mann,
Whitney: On a test of whether one of two random variables is stochastically larger than the other, 1947; Bauer: Constructing confidence
sets using rank statistics, 1972): no distribution is assumed, and both plans need three runs. Fewer runs give a hint where they do not
overlap and differ by a tenth or more. On a busy machine many runs give a hint at most, and few only for a factor of three.

The reference is the first plan with a finite result. Another plan follows it where the interval of the difference of each compared
loss and accuracy ends within a tolerance: half a point of a share, a twentieth of other numbers. A plan is worse where the accuracy
(without one, the loss) is worse by more than that, and unproven in all other cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import truediv
from pathlib import Path
from typing import Any

from .runs import INTERRUPTED, Metric, Run, Summary, Task, choose, middle, summarize

ENOUGH = 3  # runs of both plans, from which on there is an interval
CHANCE = 20  # the rank test allows an error in 1 of 20 cases on each side
TENTH = 0.1  # part by which speeds must differ to be a hint
BEYOND = 3.0  # times as fast: more than other work on the machine does to one run
POINT, TWENTIETH = 0.005, 0.05
BUSY = 0.1  # part of the machine's processors that others may use before times are doubted
NAMED = 3  # plans that the sentence names after the two fastest
NO, HINT, YES = range(3)  # how sure a difference of speeds is
REFERENCE, FOLLOWS, UNPROVEN, WORSE = "reference", "follows", "unproven", "worse"


@dataclass(frozen=True)
class Standing:
    """One plan in the verdict."""

    name: str
    ratio: float | None = (
        None  # its time for as much work over that of the plan to take; None: it did not finish
    )
    interval: tuple[float, float] | None = (
        None  # the 90 % interval of `ratio`; None for fewer than three runs
    )
    sure: int = NO  # how sure it is that the plan to take is faster, from 0 (not) over 1 (a hint) to 2
    result: str = ""  # "reference", "follows", "unproven" or "worse"; "" where it did not finish
    why: str = ""  # the numbers behind `result`


@dataclass(frozen=True)
class Verdict:
    """The sentence, the plan to take ("" for none), a standing a plan, what weakens the sentence, and a line about each result."""

    sentence: str
    take: str
    standings: tuple[Standing, ...]
    doubts: tuple[str, ...]
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """All runs, and the verdict on them."""

    task: Task | None  # what ran; None where the runs existed before
    summaries: tuple[Summary, ...]
    metrics: Sequence[Metric]
    missing: str  # a sentence about names that were asked for and that no run logged, or ""
    verdict: Verdict
    folder: Path
    machine: dict[str, Any]  # its facts, from the first run with a record
    # The `Prediction` of a plan by its name, where asked for.
    predicted: Mapping[str, Any] = field(default_factory=dict)

    @property
    def interrupted(self) -> bool:
        return any(run.end.status == INTERRUPTED for plan in self.summaries for run in plan.runs)


def conclude(task: Task | None, runs: Sequence[Run], folder: Path, metrics: Sequence[str] = ()) -> Comparison:
    """Compare the plans of `runs` by the logged `metrics`; without names by loss and accuracy, or all of a few."""
    summaries = summarize(runs)
    logged = [name for run in runs if run.record is not None for name in run.record.curves]
    chosen = choose(logged, metrics)
    absent, known = [name for name in metrics if name not in logged], ", ".join(sorted(set(logged)))
    known = known or "nothing, so the script calls no acc.log"
    missing = f"No run logged {', '.join(absent)}. Logged: {known}." if absent else ""
    machine = next((run.record.machine for run in runs if run.record is not None), {})
    there = [m for m in chosen if m.name in logged]
    verdict = judge(summaries, there, machine.get("threads"), " (--repeats)" * bool(task))
    return Comparison(task, summaries, chosen, missing, verdict, folder, machine)


# -- how sure


def interval(
    one: Sequence[float], two: Sequence[float], apart: Callable[[float, float], float]
) -> tuple[float, float] | None:
    """The 90 % interval of how far apart two samples are, by pairs of their values; None for too few values."""
    m, n = len(one), len(two)
    pairs = sorted(apart(a, b) for a in one for b in two)
    dropped, chance = 0, _orders(m, n, 0)
    while chance * CHANCE <= math.comb(m + n, n):
        dropped += 1
        chance += _orders(m, n, dropped)
    return (pairs[dropped - 1], pairs[-dropped]) if dropped else None


@cache
def _orders(m: int, n: int, u: int) -> int:
    """The orders of `m` and `n` values in which `u` pairs are inverted (the recurrence of Mann and Whitney)."""
    if u < 0 or not m or not n:
        return int(u == 0)
    return _orders(m - 1, n, u - n) + _orders(m, n - 1, u)


def _faster(one: Summary, two: Summary, busy: bool) -> int:
    """How sure it is that `one` is faster than `two`."""
    times = one.speed / two.speed
    between = interval(one.speeds, two.speeds, truediv)
    if between is not None:
        return NO if between[0] <= 1 else HINT if busy else YES
    overlap = min(one.speeds) <= max(two.speeds)
    return NO if overlap or times < (BEYOND if busy else 1 / (1 - TENTH)) else HINT


def _result(reference: Summary, plan: Summary, metrics: Sequence[Metric]) -> tuple[str, str]:
    """Whether the plan's metrics follow those of `reference`, and the numbers; the first metric decides whether it is worse."""
    if plan is reference:
        return REFERENCE, ""
    found = [_compared(reference, plan, metric) for metric in metrics]
    if found and found[0][0] == WORSE:
        return found[0]
    if found and all(result == FOLLOWS for result, _ in found):
        return FOLLOWS, "; ".join(why for _, why in found)
    usual = "no logged value tells whether its results are as good"
    return UNPROVEN, next((why for result, why in found if result != FOLLOWS), usual)


def _compared(reference: Summary, plan: Summary, metric: Metric) -> tuple[str, str]:
    one, two = reference.finals(metric), plan.finals(metric)
    if not one or not two:
        return WORSE if one else UNPROVEN, f"{(reference if two else plan).name} did not log {metric.name}"
    usual, reached = middle(one), middle(two)
    words = f"{metric.name} {metric.text(reached)} ({reference.name}: {metric.text(usual)})"
    if not all(map(math.isfinite, (*one, *two))):
        return WORSE if math.isfinite(usual) else UNPROVEN, words
    tolerance = POINT if metric.share else TWENTIETH * abs(usual)
    margin = "half a point" if metric.share else "5 %"
    lost = (usual - reached) * metric.better
    between = interval(one, two, lambda a, b: (a - b) * metric.better)
    if between is not None and between[1] <= tolerance:
        return FOLLOWS, f"{words}, within {margin}"
    if lost > tolerance and (between is None or between[0] > 0):
        return WORSE, words
    few = f"fewer than {ENOUGH} runs of each prove nothing"
    return UNPROVEN, f"{words}; {few if between is None else f'more than {margin} worse is possible'}"


# -- the sentence


def judge(summaries: Sequence[Summary], metrics: Sequence[Metric], cores: int | None, flag: str) -> Verdict:
    """Choose the fastest plan with a result that is not worse; of those as fast the reference, else one that follows it.

    Args:
        metrics: the first for which more is better decides, else the first for which less is: an accuracy, else the loss.
        cores: processors of the machine, to tell whether it was busy.
        flag: by which there are more runs, in brackets, or "".
    """
    done = [summary for summary in summaries if summary.speeds]
    doubts = _doubts(summaries, done, cores)
    names = tuple(Standing(summary.name) for summary in summaries)
    if len(done) < 2:
        some = "with at least two updates, so there is nothing to compare"
        said = f"Only {done[0].name} finished {some} it with." if done else f"No plan finished {some}."
        return Verdict(said, "", names, doubts, ())
    known = sorted((metric for metric in metrics if metric.better), key=lambda metric: -metric.better)
    finite = [p for p in done if not known or all(map(math.isfinite, p.finals(known[0]) or [math.nan]))]
    reference = (finite or done)[0]
    results = {plan.name: _result(reference, plan, known) for plan in done}
    good = [plan for plan in done if results[plan.name][0] != WORSE]
    busy = any(is_busy(run.end.others, cores) for plan in done for run in plan.runs)
    fastest = max(good, key=lambda plan: plan.speed)
    tied = [plan for plan in good if plan is fastest or not _faster(fastest, plan, busy)]
    follows = [plan for plan in tied if results[plan.name][0] == FOLLOWS]
    take = reference if reference in tied else (follows or [fastest])[0]
    found = {take.name: Standing(take.name, 1.0, None, YES, *results[take.name])}
    for plan in (plan for plan in done if plan is not take):
        known = interval(take.speeds, plan.speeds, truediv), _faster(take, plan, busy)
        found[plan.name] = Standing(plan.name, take.speed / plan.speed, *known, *results[plan.name])
    standings = tuple(found.get(plan.name, Standing(plan.name)) for plan in summaries)
    counts = sorted(len(plan.speeds) for plan in done)
    said, sure = _sentence(take.name, standings, counts, busy)
    if sure != YES:
        more = f"{ENOUGH} runs or more of each plan" if counts[0] < ENOUGH else "more runs of each plan"
        doubts = (f"To be sure, compare {more}{flag}{', on a quiet machine' * busy}.", *doubts)
    evidence = tuple(f"{s.name} {s.result}: {s.why}." for s in standings if s.why)
    return Verdict(said, take.name, standings, doubts, evidence)


def _sentence(take: str, standings: Sequence[Standing], counts: Sequence[int], busy: bool) -> tuple[str, int]:
    """``"Use fp32: fastest of 3 (1.30 × bf16, 5 runs each, bf16 unproven); O1 30 × slower."``, and how sure that is."""
    done = sorted((s for s in standings if s.ratio), key=lambda s: s.ratio or 0.0)
    own = next(s for s in done if s.name == take)
    lost = [s for s in done if s.result == WORSE and (s.ratio or 0.0) < 1]  # faster than the plan to take
    rivals = [s for s in done if s is not own and s not in lost]
    sure = min((s.sure for s in rivals), default=YES)
    among = f"{len(rivals) + 1}{' with results as good' * bool(lost)}"
    if not rivals:
        reason = f"the only one of {len(done)} whose results are not worse"
    elif sure:
        reason = f"fastest of {among}"
    else:
        other = f"no other of {among} is" if len(done) > 2 else f"{rivals[0].name} is not"
        reason = f"{other} shown to be faster"
    basis = [f"{ratio(s.ratio or 0.0)} × {s.name}" for s in rivals[:1]]
    few, many = counts[0], counts[-1]
    basis.append(f"{few if few == many else f'{few} to {many}'} run{'s' * (many > 1)} each")
    basis += ["busy machine"] * (busy and sure == HINT)
    basis += [f"{s.name} {s.result}" for s in (own, *rivals[:1]) if s.result in (UNPROVEN, WORSE)]
    rest = [f"{s.name} {_slower(s) if s.sure else 'as fast'}" for s in rivals[1:]]
    if len(rest) > NAMED:
        rest = [f"{len(rest)} others up to {_slower(rivals[-1])}"]
    rest += [f"{s.name} {_slower(s)}, but worse: {s.why}" for s in lost]
    rest += [f"{s.name} did not finish" for s in standings if not s.ratio]
    said = f"{'Probably use' if sure == HINT else 'Use'} {take}"
    said += " if its results are good enough" * (own.result == UNPROVEN)
    return "; ".join([f"{said}: {reason} ({', '.join(basis)})", *rest]) + ".", sure


def _slower(plan: Standing) -> str:
    times = plan.ratio or 0.0
    return f"{ratio(times)} × slower" if times >= 1 else f"{ratio(1 / times)} × faster"


def is_busy(others: float | None, cores: int | None) -> bool:
    """Whether other work used enough processors to doubt the times."""
    return cores is not None and others is not None and others > BUSY * cores


def _doubts(summaries: Sequence[Summary], done: Sequence[Summary], cores: int | None) -> tuple[str, ...]:
    runs = [(summary, run) for summary in summaries for run in summary.runs]
    busy = [(run.end.others, s.name, run.number) for s, run in runs if is_busy(run.end.others, cores)]
    doubts = []
    if busy:
        most, name, number = max(busy)
        doubts.append(
            f"The machine was busy: other work used {most:.1f} of its {cores} processors during {name} (run {number}), and more than a "
            f"tenth of them in {len(busy)} of {len(runs)} runs."
        )
    if len({count for summary in done for count in summary.counts}) > 1:
        said = ", ".join(f"{summary.name}: {_counted(summary)}" for summary in done)
        unit = done[0].unit
        doubts.append(f"The runs differ in length, so speeds are compared, in {unit} a second ({said}).")
    running = [s.name for s, run in runs if run.record and not run.record.ended and not run.end.why]
    if running:
        doubts.append(f"A run of {running[0]} has not ended: its numbers are those so far.")
    several = [summary.name for summary, run in runs if run.record and run.record.trainings > 1]
    if several:
        doubts.append(
            f"The script made several Accelerators under {several[0]}: the one with most updates counts."
        )
    return tuple(doubts)


def _counted(summary: Summary) -> str:
    updates, samples = max(summary.counts, key=lambda pair: pair[0])
    return f"{updates:,} updates" + (f", {samples:,} samples" if samples is not None else "")


def ratio(value: float) -> str:
    """``"0.62"``, ``"1.31"``, ``"12"``."""
    return f"{value:.2f}" if value < 9.95 else f"{value:.0f}"
