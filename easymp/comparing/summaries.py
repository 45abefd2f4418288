"""The runs of each plan, taken together: medians, and how far they lie apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .metrics import Metric
from .records import Record
from .running import FINISHED, End
from .variants import Variant


@dataclass(frozen=True)
class Run:
    """One run of one plan; `number` counts the plan's runs from 1."""

    variant: Variant
    number: int
    seed: int | None
    end: End
    record: Record | None

    @property
    def before(self) -> float | None:
        """Seconds from the start of the processes to the end of the first update: imports, data, warm-up."""
        if self.record is None or self.record.first is None:
            return None
        return self.record.begun - self.end.started + self.record.first

    @property
    def speed(self) -> float | None:
        """Samples a second where they are known, else updates a second."""
        record = self.record
        if record is None or not record.seconds:
            return None
        return (record.updates if record.samples is None else record.samples) / record.seconds

    def final(self, metric: Metric) -> float | None:
        """What the metric came to."""
        points = self.record.curves.get(metric.name) if self.record is not None else None
        return metric.final([point.value for point in points]) if points else None


@dataclass(frozen=True)
class Spread:
    """Numbers of several runs: their median, smallest and largest."""

    count: int
    median: float
    least: float
    most: float

    @property
    def width(self) -> float:
        return self.most - self.least


def spread(values: Iterable[float | None]) -> Spread | None:
    """None where there is no value; one that is not a number makes all of them that."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    if any(math.isnan(value) for value in known):
        return Spread(len(known), math.nan, math.nan, math.nan)
    return Spread(len(known), statistics.median(known), min(known), max(known))


@dataclass(frozen=True)
class Summary:
    """A plan and its runs. Numbers are those of the runs that finished; None where there are none."""

    variant: Variant
    runs: tuple[Run, ...]

    @property
    def name(self) -> str:
        return self.variant.name

    @property
    def finished(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.end.status == FINISHED)

    @property
    def troubles(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.end.status != FINISHED)

    @property
    def seconds(self) -> Spread | None:
        return spread(run.record.seconds for run in self.finished if run.record is not None)

    @property
    def speed(self) -> Spread | None:
        return spread(run.speed for run in self.finished)

    @property
    def before(self) -> Spread | None:
        return spread(run.before for run in self.finished)

    @property
    def peak(self) -> Spread | None:
        return spread(float(run.record.peak) for run in self.finished if run.record is not None)

    @property
    def counts(self) -> set[tuple[int, int | None]]:
        """Updates and samples that were timed, of each run."""
        return {(run.record.updates, run.record.samples) for run in self.finished if run.record is not None}

    def final(self, metric: Metric) -> Spread | None:
        return spread(run.final(metric) for run in self.finished)

    @property
    def typical(self) -> Run | None:
        """Of the finished runs the one whose time is the median, to stand for all in a plot; or any run that has a record."""
        timed = sorted(
            (run for run in self.finished if run.speed is not None), key=lambda run: run.speed or 0.0
        )
        rest = [run for run in self.runs if run.record is not None]
        return timed[(len(timed) - 1) // 2] if timed else rest[0] if rest else None


def summarise(variants: Sequence[Variant], runs: Sequence[Run]) -> list[Summary]:
    """A summary a plan of which a run has begun, in the plans' order."""
    by_plan = [Summary(variant, tuple(run for run in runs if run.variant is variant)) for variant in variants]
    return [summary for summary in by_plan if summary.runs]
