"""What the plots show, as plain numbers: a line a plan, thinned to what an eye can see."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .metrics import Metric
from .records import Point, Record
from .summaries import Summary

MANY = 400  # points of a line; more cannot be told apart
NOISY = 60  # logged values from which on they are taken for those of single batches, which scatter
PARTS = 25  # of a noisy curve, over each of which a running mean goes


@dataclass(frozen=True)
class Line:
    """One run of the plan number `plan`. `main` is what stands for the plan; other runs, and values behind a mean, are drawn faintly."""

    plan: int
    points: list[tuple[float, float]]
    main: bool


def by_update(summaries: Sequence[Summary], metric: Metric) -> list[Line]:
    return _curves(summaries, metric, lambda point: float(point.update))


def by_seconds(summaries: Sequence[Summary], metric: Metric) -> list[Line]:
    return _curves(summaries, metric, lambda point: point.seconds)


def memory(summaries: Sequence[Summary]) -> list[Line]:
    """Bytes over seconds, from the Accelerator on (what lies before the first update is below 0)."""
    lines = _lines(summaries, lambda record: [(seconds, float(count)) for seconds, count in record.memory])
    return [Line(line.plan, thinned(line.points), line.main) for line in lines]


def _curves(summaries: Sequence[Summary], metric: Metric, where: Callable[[Point], float]) -> list[Line]:
    def points(record: Record) -> list[tuple[float, float]]:
        return [(where(point), point.value) for point in record.curves.get(metric.name, ())]

    found = []
    for line in _lines(summaries, points):
        if len(line.points) > NOISY:
            found += [Line(line.plan, thinned(line.points), False)] * line.main
            line = Line(line.plan, running_mean(line.points), line.main)
        found.append(Line(line.plan, thinned(line.points), line.main))
    return found


def _lines(summaries: Sequence[Summary], read: Callable[[Record], list[tuple[float, float]]]) -> list[Line]:
    found = []
    for index, summary in enumerate(summaries):
        for run in sorted(summary.runs, key=lambda run: run is summary.typical):  # the main one last, on top
            points = (
                [pair for pair in read(run.record) if all(map(math.isfinite, pair))]
                if run.record is not None
                else []
            )
            if points:
                found.append(Line(index, points, run is summary.typical))
    return found


def running_mean(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Each value the mean of those around it: of one part in `PARTS` of all, of fewer at the ends, as many on either side."""
    half = max(1, len(points) // (2 * PARTS))
    sums = [0.0, *itertools.accumulate(value for _, value in points)]
    means = []
    for i, (x, _) in enumerate(points):
        reach = min(half, i, len(points) - 1 - i)
        means.append((x, (sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1)))
    return means


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `MANY` points: of each stretch the smallest and the largest value, in their order, so that no peak is lost; and the ends."""
    if len(points) <= MANY:
        return list(points)
    size = math.ceil(len(points) / ((MANY - 2) // 2))
    kept = [points[0]]
    for start in range(0, len(points), size):
        stretch = range(start, min(start + size, len(points)))
        ends = {min(stretch, key=lambda i: points[i][1]), max(stretch, key=lambda i: points[i][1])}
        kept += [points[i] for i in sorted(ends - {0, len(points) - 1})]
    return [*kept, points[-1]]


def wants_log(lines: Sequence[Line]) -> bool:
    """Whether values lie so far apart that equal steps hide the small ones."""
    values = [value for line in lines for _, value in line.points]
    return bool(values) and min(values) > 0 and max(values) > 30 * min(values)


def noisy(summaries: Sequence[Summary], metric: Metric) -> bool:
    """Whether any curve of it is drawn as a running mean."""
    runs = (run.record for summary in summaries for run in summary.runs if run.record is not None)
    return any(len(record.curves.get(metric.name, ())) > NOISY for record in runs)
