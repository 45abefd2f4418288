"""The verdict on all runs: which plan to take, and how sure that is. Terminal, page, picture and JSON show this one.

The speeds of two plans differ where the 90 % interval of their ratio excludes 1. It is the interval of the exact rank
test (Mann, Whitney: On a test of whether one of two random variables is stochastically larger than the other, 1947;
Bauer: Constructing confidence sets using rank statistics, 1972): no distribution is assumed, and both plans need three
runs. Fewer runs give a hint where they do not overlap and differ by a tenth or more.

The reference is the first plan with a finite result. Another plan follows it where the interval of the difference of
each compared loss and accuracy ends within a tolerance: half a point of a share, a twentieth of other numbers. A plan
is worse where the accuracy (without one, the loss) is worse by more than that, and unproven in all other cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import truediv
from pathlib import Path
from typing import Any

from ..harness import INTERRUPTED, Script
from .runs import Metric, Run, Summary, choose, median, summarize

ENOUGH = 3  # runs of both plans, from which on there is an interval
CHANCE = 20  # the rank test allows an error in 1 of 20 cases on each side
HINT_RATIO = 1 / 0.9  # of speeds that few runs must reach for a hint
SHARE_TOLERANCE, TOLERANCE = 0.005, 0.05
NO, HINT, YES = range(3)  # how sure a difference of speeds is
REFERENCE, FOLLOWS, UNPROVEN, WORSE = "reference", "follows", "unproven", "worse"


@dataclass(frozen=True)
class Standing:
    """One plan in the verdict."""

    name: str
    ratio: float | None = None  # its time for as much work over the recommended plan's; None: it did not finish
    interval: tuple[float, float] | None = None  # the 90 % interval of `ratio`; None for fewer than three runs
    sure: int = NO  # how sure it is that the recommended plan is faster, from 0 (not) over 1 (a hint) to 2
    result: str = ""  # "reference", "follows", "unproven" or "worse"; "" where it did not finish
    reason: str = ""  # the numbers behind `result`


@dataclass(frozen=True)
class Verdict:
    """The sentence, the recommended plan ("" for none), a standing a plan, and what weakens the sentence."""

    sentence: str
    recommended: str
    standings: tuple[Standing, ...]
    doubts: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """All runs, and the verdict on them."""

    script: Script | None  # None where the runs existed before
    summaries: tuple[Summary, ...]
    metrics: Sequence[Metric]
    missing: str  # a sentence about requested names that no run logged, or ""
    verdict: Verdict
    folder: Path
    machine: Mapping[str, Any]  # its facts, from the first run with a record

    @property
    def interrupted(self) -> bool:
        return any(run.end.status == INTERRUPTED for plan in self.summaries for run in plan.runs)


def conclude(script: Script | None, runs: Sequence[Run], folder: Path, metrics: Sequence[str] = ()) -> Comparison:
    """Compare the plans of `runs` by the logged `metrics`; without names by loss and accuracy, or all of a few."""
    summaries = summarize(runs)
    records = [run.record for run in runs if run.record is not None]
    logged = list(dict.fromkeys(name for record in records for name in record.curves))
    absent, names = [name for name in metrics if name not in logged], ", ".join(sorted(logged))
    missing = f"No run logged {', '.join(absent)}. Logged: {names or 'nothing, so the script calls no acc.log'}."
    machine = records[0].machine if records else {}
    compared = choose(logged, metrics)
    verdict = judge(summaries, [m for m in compared if m.name in logged], script is not None)
    return Comparison(script, summaries, compared, missing if absent else "", verdict, folder, machine)


def interval(
    first: Sequence[float], second: Sequence[float], difference: Callable[[float, float], float]
) -> tuple[float, float] | None:
    """The 90 % interval of the difference of two samples, by pairs of their values; None for too few values."""
    m, n = len(first), len(second)
    pairs = sorted(difference(a, b) for a in first for b in second)
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


def _faster(first: Summary, second: Summary) -> int:
    """How sure it is that `first` is faster than `second`."""
    bounds = interval(first.speeds, second.speeds, truediv)
    if bounds is not None:
        return NO if bounds[0] <= 1 else YES
    overlap = min(first.speeds) <= max(second.speeds)
    return NO if overlap or first.speed / second.speed < HINT_RATIO else HINT


def _compare_results(reference: Summary, plan: Summary, metrics: Sequence[Metric]) -> tuple[str, str]:
    """Whether the plan's metrics follow those of `reference`, and the numbers; the first metric can make it worse."""
    if plan is reference:
        return REFERENCE, ""
    results = [_compare_metric(reference, plan, metric) for metric in metrics]
    if results and results[0][0] == WORSE:
        return results[0]
    if results and all(result == FOLLOWS for result, _ in results):
        return FOLLOWS, "; ".join(numbers for _, numbers in results)
    unproven = [numbers for result, numbers in results if result != FOLLOWS]
    return UNPROVEN, unproven[0] if unproven else "no logged value tells whether its results are as good"


def _compare_metric(reference: Summary, plan: Summary, metric: Metric) -> tuple[str, str]:
    expected, values = reference.finals(metric), plan.finals(metric)
    if not expected or not values:
        return WORSE if expected else UNPROVEN, f"{(reference if values else plan).name} did not log {metric.name}"
    target, value = median(expected), median(values)
    numbers = f"{metric.name} {metric.text(value)} ({reference.name}: {metric.text(target)})"
    if not all(map(math.isfinite, (*expected, *values))):
        return WORSE if math.isfinite(target) else UNPROVEN, numbers
    tolerance = SHARE_TOLERANCE if metric.share else TOLERANCE * abs(target)
    margin = "half a point" if metric.share else "5 %"
    loss = (target - value) * metric.direction
    bounds = interval(expected, values, lambda a, b: (a - b) * metric.direction)
    if bounds is not None and bounds[1] <= tolerance:
        return FOLLOWS, f"{numbers}, within {margin}"
    if loss > tolerance and (bounds is None or bounds[0] > 0):
        return WORSE, numbers
    if bounds is None:
        return UNPROVEN, f"{numbers}; fewer than {ENOUGH} runs of each prove nothing"
    return UNPROVEN, f"{numbers}; more than {margin} worse is possible"


def judge(summaries: Sequence[Summary], metrics: Sequence[Metric], repeatable: bool) -> Verdict:
    """Recommend the fastest plan that is not worse; among equally fast ones the reference, else one that follows it.

    Results are compared by the first metric for which more is better (an accuracy), else less is better (a loss).
    `repeatable`: the command has a flag for more runs.
    """
    timed = [summary for summary in summaries if summary.speeds]
    doubts = []
    if len({count for summary in timed for count in summary.counts}) > 1:
        lengths = ", ".join(f"{summary.name}: {max(summary.counts)[0]:,} updates" for summary in timed)
        doubts.append(f"The runs differ in length, so {timed[0].unit} a second are compared ({lengths}).")
    for summary in summaries:
        if any(run.record and not run.record.complete and not run.end.why for run in summary.runs):
            doubts.append(f"A run of {summary.name} has not ended: its numbers are those so far.")
    if len(timed) < 2:
        subject = f"Only {timed[0].name}" if timed else "No plan"
        sentence = f"{subject} finished with at least two updates, so there is nothing to compare."
        return Verdict(sentence, "", tuple(Standing(summary.name) for summary in summaries), tuple(doubts))
    ranked = sorted((metric for metric in metrics if metric.direction), key=lambda metric: -metric.direction)
    finite = [p for p in timed if not ranked or all(map(math.isfinite, p.finals(ranked[0]) or [math.nan]))]
    reference = (finite or timed)[0]
    results = {plan.name: _compare_results(reference, plan, ranked) for plan in timed}
    candidates = [plan for plan in timed if results[plan.name][0] != WORSE]
    fastest = max(candidates, key=lambda plan: plan.speed)
    tied = [plan for plan in candidates if plan is fastest or not _faster(fastest, plan)]
    following = [plan for plan in tied if results[plan.name][0] == FOLLOWS]
    recommended = reference if reference in tied else (following or [fastest])[0]
    standings = []
    for plan in summaries:
        if plan not in timed:
            standings.append(Standing(plan.name))
        elif plan is recommended:
            standings.append(Standing(plan.name, 1.0, None, YES, *results[plan.name]))
        else:
            ratio, bounds = recommended.speed / plan.speed, interval(recommended.speeds, plan.speeds, truediv)
            standings.append(Standing(plan.name, ratio, bounds, _faster(recommended, plan), *results[plan.name]))
    counts = sorted(len(plan.speeds) for plan in timed)
    sentence, sure = _sentence(recommended.name, standings, counts)
    if sure != YES:
        repeats = f"{ENOUGH} runs or more of each plan" if counts[0] < ENOUGH else "more runs of each plan"
        doubts.insert(0, f"To be sure, compare {repeats}{' (--repeats)' if repeatable else ''}.")
    return Verdict(sentence, recommended.name, tuple(standings), tuple(doubts))


def _sentence(recommended: str, standings: Sequence[Standing], counts: Sequence[int]) -> tuple[str, int]:
    """``"Use fp32: bf16 took 1.30 × as long, O1 30 × (5 runs each, bf16 unproven)."``, and how sure that is."""
    finished = sorted((s for s in standings if s.ratio), key=lambda s: s.ratio or 0.0)
    times = {s.name: f"{ratio_text(s.ratio or 0.0)} ×" for s in finished}
    winner = next(s for s in finished if s.name == recommended)
    rejected = [s for s in finished if s.result == WORSE and (s.ratio or 0.0) < 1]
    rivals = [s for s in finished if s is not winner and s not in rejected]
    sure = min((s.sure for s in rivals), default=YES)
    reason = "its results are not worse"
    if rivals:
        shown = rivals if len(rivals) <= 3 else [rivals[0], rivals[-1]]
        reason = f"{shown[0].name} took {times[shown[0].name]} as long"
        reason += "".join(f", {s.name} {times[s.name]}" for s in shown[1:])
    if sure == NO:
        reason = f"no other plan is shown to be faster; {reason}"
    runs = f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
    basis = [f"{runs} run{'s' if counts[-1] > 1 else ''} each"]
    basis += [f"{s.name} {s.result}" for s in (winner, *rivals[:1]) if s.result in (UNPROVEN, WORSE)]
    head = f"{'Probably use' if sure == HINT else 'Use'} {recommended}"
    head += " if its results are good enough" if winner.result == UNPROVEN else ""
    clauses = [f"{s.name} took {times[s.name]} as long, but is worse: {s.reason}" for s in rejected]
    clauses += [f"{s.name} did not finish" for s in standings if not s.ratio]
    return "; ".join([f"{head}: {reason} ({', '.join(basis)})", *clauses]) + ".", sure


def ratio_text(value: float) -> str:
    """``"0.62"``, ``"1.31"``, ``"12"``."""
    return f"{value:.2f}" if value < 9.95 else f"{value:.0f}"
