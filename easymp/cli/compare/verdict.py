"""The verdict on all runs: a sentence that is as strong as its evidence.

Times of two plans differ where, of three runs of each or more, all of one lie beyond all of the other; with equal plans that happens
by chance in 1 of 10 cases at three runs, and in 1 of 35 at four. Fewer runs give a hint where times differ by a tenth or more. On a
busy machine many runs give a hint at most, and few give none.

A metric is worse where its median is, by more than runs of one plan lie apart. Where that is not known (one run, or runs of one seed
that all ended alike), half a point of a share and a twentieth of other numbers count as chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.units import size
from .runs import Task, Variant
from .summary import Metric, Run, Spread, Summary, choose, ratio, seconds

ENOUGH = 3  # runs of each plan, from which on their times can show a difference
TENTH = 0.1  # part by which times must differ to be a hint
BEYOND = 3.0  # times as long: more than other work on the machine does to one run
POINT, TWENTIETH = 0.005, 0.05
BUSY = 0.1  # part of the machine's processors that others may use before times are doubted
NOT, HINT, YES = (
    "no difference is shown: it took",
    "seems to take",
    "takes",
)  # how certain a difference of times is


@dataclass(frozen=True)
class Verdict:
    """The sentence, its evidence (a line for each plan that it does not name), and the doubts that weaken it."""

    sentence: str
    evidence: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """All runs, and the verdict on them.

    Attributes:
        repeats: how often each plan was to run.
        summaries: by plan, in the order given.
        metrics: the compared metrics.
        missing: names that were asked for and that no run logged.
        folder: where records, output and reports are.
        interrupted: whether Ctrl-C came before all had run.
    """

    task: Task
    repeats: int
    summaries: tuple[Summary, ...]
    metrics: tuple[Metric, ...]
    missing: tuple[str, ...]
    verdict: Verdict
    folder: Path
    interrupted: bool

    @property
    def failed(self) -> bool:
        """Whether any run did not finish."""
        return any(summary.troubles for summary in self.summaries)

    @property
    def machine(self) -> dict[str, Any]:
        """Facts of the machine, from the first run with a record."""
        return _machine([run for summary in self.summaries for run in summary.runs])


def _machine(runs: Sequence[Run]) -> dict[str, Any]:
    return next((run.record.machine for run in runs if run.record is not None), {})


def conclude(
    task: Task,
    variants: Sequence[Variant],
    runs: Sequence[Run],
    folder: Path,
    *,
    repeats: int = 1,
    metrics: Sequence[str] = (),
    interrupted: bool = False,
) -> Comparison:
    """Compare `runs` of `variants`; plans without a run are left out."""
    by_plan = [Summary(variant, tuple(run for run in runs if run.variant is variant)) for variant in variants]
    summaries = tuple(summary for summary in by_plan if summary.runs)
    logged = [name for run in runs if run.record is not None for name in run.record.curves]
    chosen = choose(logged, metrics)
    missing = tuple(name for name in metrics if name not in logged)
    known = [metric for metric in chosen if metric.name in logged]
    verdict = judge(summaries, known, _machine(runs).get("threads"))
    return Comparison(task, repeats, summaries, tuple(chosen), missing, verdict, folder, interrupted)


def judge(summaries: Sequence[Summary], metrics: Sequence[Metric], cores: int | None = None) -> Verdict:
    """Compare each plan with the first that finished.

    Args:
        metrics: the first for which more is better decides, else the first for which less is: an accuracy, else the loss.
        cores: processors of the machine, to tell whether it was busy.
    """
    done = [summary for summary in summaries if summary.speed is not None]
    doubts = _doubts(summaries, cores)
    if not done:
        said = "No plan finished with at least two updates, so there is nothing to compare."
        return Verdict(said, (), tuple(doubts))
    base, others = done[0], done[1:]
    if base is not summaries[0]:
        doubts.insert(0, f"{summaries[0].name} did not finish: others are compared with {base.name}.")
    if not others:
        return Verdict(f"Only {base.name} finished: there is nothing to compare it with.", (), tuple(doubts))
    known = sorted((metric for metric in metrics if metric.better), key=lambda metric: -metric.better)
    busy = any(is_busy(run.end.others, cores) for summary in done for run in summary.runs)
    pairs = [Pair(base, other, known[0] if known else None, busy) for other in others]
    told, sentence = _sentence(pairs)
    if len(set().union(*(summary.counts for summary in done))) > 1:
        said = ", ".join(f"{summary.name}: {_counted(summary)}" for summary in done)
        doubts.append(
            f"The runs trained on different numbers of samples: times are compared by speed ({said})."
        )
    return Verdict(sentence, tuple(pair.evidence() for pair in pairs if pair is not told), tuple(doubts))


class Pair:
    """A plan beside the base, which all are compared with; `quality` is the metric that decides."""

    def __init__(self, base: Summary, plan: Summary, quality: Metric | None, busy: bool) -> None:
        self.base, self.plan, self.quality = base, plan, quality
        one, two = base.speed, plan.speed
        assert one is not None
        assert two is not None
        self.counts = one.count, two.count
        self.ratio = one.median / two.median  # the plan's time, as a part of the base's
        self.few = min(self.counts) < ENOUGH
        self.doubt = self._doubt(one, two, busy)  # why no difference of times is shown, or ""
        self.shown = NOT if self.doubt else HINT if self.few or busy else YES
        self.faster = self.ratio < 1 and not self.doubt
        self.worse, self.result = self._result() if quality is not None else (False, "")

    def _doubt(self, one: Spread, two: Spread, busy: bool) -> str:
        if not (two.least > one.most or two.most < one.least):
            return "and their runs overlap" if sum(self.counts) > 2 else "in equal time"
        if self.few and busy and 1 / BEYOND < self.ratio < BEYOND:
            return "on a busy machine"
        return "less than a tenth apart" if self.few and abs(1 - self.ratio) < TENTH else ""

    def _result(self) -> tuple[bool, str]:
        """Whether the plan's metric is worse, and words for both."""
        metric = self.quality
        assert metric is not None
        one, two = self.base.final(metric), self.plan.final(metric)
        if one is None or two is None:
            name = (self.plan if two is None else self.base).name
            return one is not None, f"{name} did not log {metric.name}"
        reached = f"reaches {metric.name} {metric.text(two.median)}"
        words = f"{reached} where {self.base.name} reaches {metric.text(one.median)}"
        if not (math.isfinite(two.median) and math.isfinite(one.median)):
            return not math.isfinite(two.median), words
        lost = (one.median - two.median) * metric.better
        wide = max(one.most - one.least, two.most - two.least) if min(one.count, two.count) > 1 else 0.0
        if wide and abs(lost) <= wide:
            words += ", no more apart than runs of one plan are"
        return lost > (wide or (POINT if metric.share else TWENTIETH * abs(one.median))), words

    def time(self, plan: Summary) -> str:
        """``"12.1 s [11.9 s to 12.4 s]"``; a speed where runs differ in length."""
        counts = self.base.counts | self.plan.counts
        number = plan.seconds if len(counts) == 1 else plan.speed
        assert number is not None
        if len(counts) == 1:
            median, least, most = map(seconds, (number.median, number.least, number.most))
        else:
            unit = "updates" if any(samples is None for _, samples in counts) else "samples"
            median, least, most = (f"{n:,.4g}" for n in (number.median, number.least, number.most))
            median += f" {unit}/s"
        return f"{median} [{least} to {most}]" if number.count > 1 else median

    def basis(self) -> str:
        """``"median of 3: 12.1 s [11.9 s to 12.4 s] against 19.5 s [19.2 s to 20.1 s]"``."""
        kind = "one run each" if max(self.counts) == 1 else f"median of {min(self.counts)}"
        return f"{kind}: {self.time(self.plan)} against {self.time(self.base)}"

    def memory(self) -> str:
        one, two = self.base.peak, self.plan.peak
        if one is None or two is None or not one.median or abs(1 - two.median / one.median) < TENTH:
            return ""
        return f", with {ratio(two.median / one.median)} of its memory ({size(two.median)})"

    def evidence(self) -> str:
        """A short line about a plan that the sentence does not name."""
        reached = self.plan.final(self.quality) if self.quality is not None else None
        result = (
            f"; reaches {self.quality.name} {self.quality.text(reached.median)}"
            if self.quality and reached
            else ""
        )
        part = f"{ratio(self.ratio)} of {self.base.name}'s time ({self.time(self.plan)})"
        return f"{self.plan.name}: {self.shown} {part}{result}{self.memory()}."


def _sentence(pairs: Sequence[Pair]) -> tuple[Pair, str]:
    """The plan to speak of, and the sentence: the fastest that is no worse, else the fastest."""
    pair = min(pairs, key=lambda pair: (not pair.faster, pair.worse and pair.faster, pair.ratio))
    name, base, basis = pair.plan.name, pair.base.name, pair.basis()
    part = f"{ratio(pair.ratio)} of {base}'s time ({basis})"
    how = f"--repeats {ENOUGH} or more" if pair.few else "more --repeats, on a quiet machine,"
    more = f"Compare again with {how} to know."
    if pair.doubt:
        return pair, f"No difference is shown: {name} took {part}, {pair.doubt}. {more}"
    if not pair.faster:
        rest = ", and the others more" if len(pairs) > 1 else ""
        slower = f"{name} {pair.shown} {ratio(pair.ratio)} times as long as {base} ({basis}){rest}"
        return pair, f"{slower}: stay with {base}."
    if pair.worse:
        return pair, f"{name} takes {part}, but {pair.result}: stay with {base}."
    claim = f"{name} takes {part}{f' and {pair.result}' if pair.result else ''}{pair.memory()}"
    if pair.shown is HINT:
        return pair, f"{claim}: a hint to take {name}, no more. {more}"
    unknown = "" if pair.quality else ", if its results are as good: no metric was logged to say so"
    return pair, f"{claim}: take {name}{unknown}."


def is_busy(others: float, cores: int | None) -> bool:
    """Whether other work used enough processors to doubt the times."""
    return cores is not None and others > BUSY * cores


def _doubts(summaries: Sequence[Summary], cores: int | None) -> list[str]:
    runs = [(summary, run) for summary in summaries for run in summary.runs]
    busy = [(run.end.others, s.name, run.number) for s, run in runs if is_busy(run.end.others, cores)]
    doubts = []
    if busy:
        most, name, number = max(busy)
        doubts.append(
            f"The machine was busy: other work used {most:.1f} of its {cores} processors during {name} (run {number}), and more than a "
            f"tenth of them in {len(busy)} of {len(runs)} runs. Times are the worse for it."
        )
    several = [summary.name for summary, run in runs if run.record and run.record.trainings > 1]
    if several:
        doubts.append(
            f"The script made several Accelerators under {several[0]}: the one with most updates counts."
        )
    return doubts


def _counted(summary: Summary) -> str:
    updates, samples = max(summary.counts, key=lambda pair: pair[0])
    return f"{updates:,} updates" + (f", {samples:,} samples" if samples is not None else "")
