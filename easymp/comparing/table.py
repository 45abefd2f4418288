"""The comparison as rows of words: for the terminal, and for the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..base.units import size
from .metrics import Metric
from .summaries import Spread, Summary
from .writing import rate, ratio, seconds


@dataclass(frozen=True)
class Cell:
    """What stands in it, and below, in small letters, how far the runs lie apart; "" where there was one."""

    text: str
    below: str = ""


@dataclass(frozen=True)
class Row:
    """A plan; `troubles` are sentences of runs that did not finish."""

    summary: Summary
    cells: tuple[Cell, ...]
    troubles: tuple[str, ...]


def heads(summaries: Sequence[Summary], metrics: Sequence[Metric]) -> list[str]:
    """What stands over the columns, the plan's name first."""
    return [
        "plan",
        "time",
        "ratio",
        f"{unit(summaries)}/s",
        "memory",
        *(metric.name for metric in metrics),
        "start-up",
    ]


def unit(summaries: Sequence[Summary]) -> str:
    """What speeds count: "samples" where they are known in every run that finished, else "updates"."""
    counts = set().union(*(summary.counts for summary in summaries))
    return "samples" if counts and all(samples is not None for _, samples in counts) else "updates"


def rows(summaries: Sequence[Summary], metrics: Sequence[Metric]) -> list[Row]:
    """A row a plan, with cells for `heads` after the first."""
    base = next((summary for summary in summaries if summary.speed is not None), None)
    return [
        Row(summary, tuple(_cells(summary, base, metrics)), tuple(troubles(summary))) for summary in summaries
    ]


def troubles(summary: Summary) -> Iterator[str]:
    """``"failed (2 of 3 runs): why"``, once for runs that ended alike."""
    ends = [(run.end.status, run.end.why) for run in summary.troubles]
    for status, why in dict.fromkeys(ends):
        several = (
            f" ({ends.count((status, why))} of {len(summary.runs)} runs)" if len(summary.runs) > 1 else ""
        )
        yield f"{status}{several}: {why}"


def _cells(summary: Summary, base: Summary | None, metrics: Sequence[Metric]) -> list[Cell]:
    speed, peak = summary.speed, summary.peak
    part = "–"
    if speed is not None and base is not None and base.speed is not None:
        part = ratio(base.speed.median / speed.median)
    finals = [_cell(summary.final(metric), metric.text) for metric in metrics]
    return [
        _cell(summary.seconds, seconds),
        Cell(part),
        Cell(_cell(speed, rate).text),  # it lies as far apart as the time
        Cell("–" if peak is None else size(peak.median)),
        *finals,
        Cell("–" if summary.before is None else seconds(summary.before.median)),
    ]


def _cell(number: Spread | None, say: Callable[[float], str]) -> Cell:
    if number is None:
        return Cell("–")
    apart = number.count > 1 and say(number.least) != say(number.most)
    return Cell(say(number.median), f"{say(number.least)} … {say(number.most)}" if apart else "")
