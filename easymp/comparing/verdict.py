"""What the runs show, in a sentence that is as strong as its evidence.

Times of two plans differ where, of three runs of each or more, all of one lie beyond all of the other; with equal plans that happens
by chance in 1 of 10 cases at three runs, and in 1 of 35 at four. Fewer runs give a hint where times differ by a tenth or more. On a
busy machine many runs give no more than a hint, and few give none.

A metric is worse where its median is, by more than runs of one plan lie apart. Where that is not known (one run, or runs that all
ended alike, because they have one seed), half a point of a share and a twentieth of other numbers are taken for chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ..base.units import size
from .metrics import Metric
from .summaries import Spread, Summary
from .writing import ratio, seconds

ENOUGH = 3  # runs of each plan, from which on their times can show a difference
TENTH = 0.1  # part by which times must differ to be a hint
BEYOND = 3.0  # times as long: what other work on the machine does not make of one run
POINT, TWENTIETH = 0.005, 0.05
BUSY = 0.1  # part of the machine's processors that others may use before times are doubted


class Shown(Enum):
    """How sure a difference of times is."""

    NOT = "no difference shown"
    HINT = "hint"
    YES = "shown"


@dataclass(frozen=True)
class Verdict:
    """The sentence, what it rests on (a line for each plan that it does not name), and what weakens it."""

    sentence: str
    evidence: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Judged:
    """One plan beside the one that all are compared with. `ratio` is of its time."""

    plan: Summary
    ratio: float
    shown: Shown
    worse: bool
    words: str  # about its metric; "" where there is none
    doubt: str = ""  # why no difference of times is shown

    @property
    def faster(self) -> bool:
        return self.ratio < 1 and self.shown is not Shown.NOT


def judge(summaries: Sequence[Summary], metrics: Sequence[Metric], cores: int | None = None) -> Verdict:
    """Compare each plan with the first that finished.

    Args:
        metrics: the most telling one for which a direction is known decides: an accuracy, else the loss.
        cores: processors of the machine, by which it is told to have been busy.
    """
    done = [summary for summary in summaries if summary.speed is not None]
    doubts = _doubts(summaries, cores)
    if not done:
        return Verdict(
            "No plan finished with at least two updates, so there is nothing to compare.", (), tuple(doubts)
        )
    base, others = done[0], done[1:]
    if base is not summaries[0]:
        doubts.insert(0, f"{summaries[0].name} did not finish: others are compared with {base.name}.")
    if not others:
        return Verdict(f"Only {base.name} finished: there is nothing to compare it with.", (), tuple(doubts))
    quality = deciding(metrics)
    busy = any(is_busy(run.end.others, cores) for summary in done for run in summary.runs)
    judged = [_judge(base, other, quality, busy) for other in others]
    told, sentence = _sentence(base, judged, quality)
    rest = tuple(_evidence(base, each, quality) for each in judged if each is not told)
    return Verdict(sentence, rest, tuple(doubts + _counting(base, done)))


def deciding(metrics: Sequence[Metric]) -> Metric | None:
    """The first for which more is better, else the first for which less is."""
    known = sorted((metric for metric in metrics if metric.better), key=lambda metric: -metric.better)
    return known[0] if known else None


def is_busy(others: float | None, cores: int | None) -> bool:
    return others is not None and cores is not None and others > BUSY * cores


def _judge(base: Summary, other: Summary, quality: Metric | None, busy: bool) -> Judged:
    one, two = base.speed, other.speed
    assert one is not None
    assert two is not None
    part = one.median / two.median
    apart = two.least > one.most or two.most < one.least
    few = min(one.count, two.count) < ENOUGH
    if not apart:
        doubt = "and their runs overlap" if one.count + two.count > 2 else "in equal time"
    elif few and busy and 1 / BEYOND < part < BEYOND:
        doubt = "on a busy machine"
    elif few and abs(1 - part) < TENTH:
        doubt = "less than a tenth apart"
    else:
        doubt = ""
    shown = Shown.NOT if doubt else Shown.HINT if few or busy else Shown.YES
    worse, words = _quality(base, other, quality)
    return Judged(other, part, shown, worse, words, doubt)


def _quality(base: Summary, other: Summary, metric: Metric | None) -> tuple[bool, str]:
    """Whether the metric of `other` is worse, and words for what both reach."""
    if metric is None:
        return False, ""
    one, two = base.final(metric), other.final(metric)
    if one is None or two is None:
        return one is not None, f"{other.name if two is None else base.name} did not log {metric.name}"
    words = (
        f"reaches {metric.name} {metric.text(two.median)} where {base.name} reaches {metric.text(one.median)}"
    )
    if not math.isfinite(two.median):
        return True, words
    if not math.isfinite(one.median):
        return False, words
    lost = (one.median - two.median) * metric.better
    wide = max(one.width, two.width) if min(one.count, two.count) > 1 else 0.0
    allowed = wide or (POINT if metric.share else TWENTIETH * abs(one.median))
    if wide and abs(lost) <= wide:
        words += ", no more apart than runs of one plan are"
    return lost > allowed, words


def _sentence(base: Summary, judged: Sequence[Judged], quality: Metric | None) -> tuple[Judged, str]:
    """The plan to speak of, and what to say."""
    ranked = sorted(judged, key=lambda each: each.ratio)
    good = [each for each in ranked if each.faster and not each.worse]
    each = [*good, *(each for each in ranked if each.faster), ranked[0]][0]
    name, basis, more = each.plan.name, _basis(base, each.plan), _more(base, each.plan)
    claim = f"{name} takes {ratio(each.ratio)} of {base.name}'s time ({basis})"
    if each in good:
        claim += f"{f' and {each.words}' if each.words else ''}{_memory(base, each.plan)}"
        if each.shown is Shown.HINT:
            return each, f"{claim}: a hint to take {name}, no more. {more}"
        return (
            each,
            f"{claim}: take {name}{'.' if quality else ', if its results are as good: no metric was logged to say so.'}",
        )
    if each.faster:
        return each, f"{claim}, but {each.words}: stay with {base.name}."
    if each.shown is Shown.NOT:
        took = f"{name} took {ratio(each.ratio)} of {base.name}'s time ({basis}), {each.doubt}"
        return each, f"No difference is shown: {took}. {more}"
    takes = "takes" if each.shown is Shown.YES else "seems to take"
    rest = ", and the others more" if len(judged) > 1 else ""
    return (
        each,
        f"{name} {takes} {ratio(each.ratio)} times as long as {base.name} ({basis}){rest}: stay with {base.name}.",
    )


def _evidence(base: Summary, each: Judged, quality: Metric | None) -> str:
    """What the sentence says of its plan, of another one in short."""
    verb = {Shown.YES: "takes", Shown.HINT: "seems to take", Shown.NOT: "no difference is shown: it took"}[
        each.shown
    ]
    own = _of(_pair(base, each.plan)[1], base, each.plan)
    reached = each.plan.final(quality) if quality is not None else None
    result = (
        f"; reaches {quality.name} {quality.text(reached.median)}"
        if quality is not None and reached is not None
        else ""
    )
    return f"{each.plan.name}: {verb} {ratio(each.ratio)} of {base.name}'s time ({own}){result}{_memory(base, each.plan)}."


def _basis(base: Summary, other: Summary) -> str:
    """``"median of 3: 12.1 s [11.9 s to 12.4 s] against 19.5 s [19.2 s to 20.1 s]"``; by speeds where runs differ in length."""
    one, two = _pair(base, other)
    kind = "one run each" if max(one.count, two.count) == 1 else f"median of {min(one.count, two.count)}"
    return f"{kind}: {_of(two, base, other)} against {_of(one, base, other)}"


def _alike(base: Summary, other: Summary) -> bool:
    """Whether all runs trained on as much."""
    return len(base.counts | other.counts) == 1


def _pair(base: Summary, other: Summary) -> tuple[Spread, Spread]:
    """Times of both, or speeds."""
    one, two = (base.seconds, other.seconds) if _alike(base, other) else (base.speed, other.speed)
    assert one is not None
    assert two is not None
    return one, two


def _of(number: Spread, base: Summary, other: Summary) -> str:
    alike = _alike(base, other)

    def say(value: float) -> str:
        return seconds(value) if alike else f"{value:,.4g}"

    known = all(samples is not None for _, samples in base.counts | other.counts)
    unit = "" if alike else " samples/s" if known else " updates/s"
    between = f" [{say(number.least)} to {say(number.most)}]" if number.count > 1 else ""
    return f"{say(number.median)}{unit}{between}"


def _memory(base: Summary, other: Summary) -> str:
    one, two = base.peak, other.peak
    if one is None or two is None or not one.median or abs(1 - two.median / one.median) < TENTH:
        return ""
    return f", with {ratio(two.median / one.median)} of its memory ({size(two.median)})"


def _more(base: Summary, other: Summary) -> str:
    one, two = base.speed, other.speed
    assert one is not None
    assert two is not None
    if min(one.count, two.count) < ENOUGH:
        return f"Compare again with --repeats {ENOUGH} or more to know."
    return "Compare again with more --repeats, on a quiet machine, to know."


def _doubts(summaries: Sequence[Summary], cores: int | None) -> list[str]:
    busy = [
        (run.end.others, f"{summary.name} (run {run.number})")
        for summary in summaries
        for run in summary.runs
        if is_busy(run.end.others, cores)
    ]
    doubts = []
    if busy:
        most, which = max(busy, key=lambda pair: pair[0] or 0.0)
        doubts.append(
            f"The machine was busy: other work used {most:.1f} of its {cores} processors during {which}, and more than a tenth of them in "
            f"{len(busy)} of {sum(len(summary.runs) for summary in summaries)} runs. Times are the worse for it."
        )
    several = [
        f"{summary.name}"
        for summary in summaries
        for run in summary.runs
        if run.record and run.record.trainings > 1
    ]
    if several:
        doubts.append(
            f"The script made several Accelerators under {several[0]}: shown is the training with most updates."
        )
    return doubts


def _counting(base: Summary, done: Sequence[Summary]) -> list[str]:
    if len(set().union(*(summary.counts for summary in done))) == 1:
        return []
    said = ", ".join(f"{summary.name}: {_counted(summary)}" for summary in done)
    return [f"The runs did not train on the same number of samples, so times are compared by speed ({said})."]


def _counted(summary: Summary) -> str:
    updates, samples = max(summary.counts, key=lambda pair: pair[0])
    return f"{updates:,} updates" + (f", {samples:,} samples" if samples is not None else "")
