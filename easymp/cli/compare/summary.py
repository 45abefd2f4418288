"""The runs of each plan taken together: medians and spreads of time, memory and logged metrics, and the table of all plans."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...base.units import size
from .runs import FINISHED, End, Record, Variant

FEW = 4  # scalars, up to which all of them are columns
# Last words of names such as "eval/accuracy", "val_acc" and "top5", and whether more or less is better.
HIGHER = set("accuracy acc f1 auc auroc bleu rouge iou miou dice recall top psnr ssim r2".split())
LOWER = set("loss perplexity ppl error err wer cer mse rmse mae nll fid".split())
SHARES = {"accuracy", "acc", "top", "recall", "error", "wer", "cer", "f1"}  # from 0 to 1, shares of samples
HELD_OUT = {"eval", "val", "valid", "validation", "test", "dev"}
SCATTER = (
    40  # logged values from which on a curve is of single batches: its end is the mean of the last twentieth
)


# -- metrics -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """One logged number. `better` is 1 where more is better, -1 where less is, 0 where unknown."""

    name: str
    better: int = 0

    def text(self, value: float | None) -> str:
        """``"98.71%"`` for a share, four significant digits for others, ``"–"`` for None."""
        if value is None:
            return "–"
        if self.share and 0 <= value <= 1:
            return f"{value:.2%}"
        return f"{value:.4g}" if math.isfinite(value) else str(value)

    @property
    def share(self) -> bool:
        """Whether values from 0 to 1 are shares of samples."""
        return _last(self.name) in SHARES

    def final(self, values: Sequence[float]) -> float:
        """The end of a curve."""
        count = max(1, len(values) // 20) if len(values) > SCATTER else 1
        return sum(values[-count:]) / count


def metric(name: str) -> Metric:
    word = _last(name)
    return Metric(name, 1 if word in HIGHER else -1 if word in LOWER else 0)


def choose(names: Iterable[str], asked: Sequence[str] = ()) -> list[Metric]:
    """The metrics to compare: those asked for, or one loss and one accuracy, or all of a few that were logged."""
    names = list(dict.fromkeys(names))
    if asked:
        return [metric(name) for name in asked]
    picked = []
    for words, held_out in (({"loss"}, False), ({"accuracy", "acc"}, True)):
        found = [name for name in names if _last(name) in words]
        # The plain name first, then the loss of training, or the accuracy on held-out data.
        found.sort(key=lambda n: (len(_words(n)) > 1, bool(HELD_OUT & {*_words(n)}) != held_out))
        picked += found[:1]
    rest = [name for name in names if name not in picked]
    return [metric(name) for name in picked + (rest if len(names) <= FEW else [])]


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())


def _last(name: str) -> str:
    """Its last word; "top" of "top5", and "f1" of "f1"."""
    word = next(reversed(_words(name)), "")
    return word if word in HIGHER | LOWER else word.rstrip("0123456789")


# -- runs --------------------------------------------------------------------------------------------------------------


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
        points = self.record.curves.get(metric.name) if self.record is not None else None
        return metric.final([point.value for point in points]) if points else None


@dataclass(frozen=True)
class Spread:
    """Numbers of several runs: their median, smallest and largest."""

    count: int
    median: float
    least: float
    most: float


def spread(values: Iterable[float | None]) -> Spread | None:
    """None where there is no value; with a NaN among them all are NaN."""
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
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.end.status == FINISHED]

    @property
    def records(self) -> list[Record]:
        return [run.record for run in self.finished if run.record is not None]

    @property
    def seconds(self) -> Spread | None:
        return spread(record.seconds for record in self.records)

    @property
    def speed(self) -> Spread | None:
        return spread(run.speed for run in self.finished)

    @property
    def before(self) -> Spread | None:
        return spread(run.before for run in self.finished)

    @property
    def peak(self) -> Spread | None:
        return spread(float(record.peak) for record in self.records)

    @property
    def counts(self) -> set[tuple[int, int | None]]:
        """Updates and samples that were timed, of each run."""
        return {(record.updates, record.samples) for record in self.records}

    def final(self, metric: Metric) -> Spread | None:
        return spread(run.final(metric) for run in self.finished)

    @property
    def typical(self) -> Run | None:
        """The finished run with the median time, drawn for all in a plot; else any run that has a record."""
        timed = sorted((run for run in self.finished if run.speed), key=lambda run: run.speed or 0.0)
        rest = [run for run in self.runs if run.record is not None]
        return timed[(len(timed) - 1) // 2] if timed else rest[0] if rest else None

    @property
    def troubles(self) -> list[str]:
        """``"failed (2 of 3 runs): why"``, once for runs that ended alike."""
        ends = [(run.end.status, run.end.why) for run in self.runs if run.end.status != FINISHED]
        found = []
        for end in dict.fromkeys(ends):
            share = f" ({ends.count(end)} of {len(self.runs)} runs)" if len(self.runs) > 1 else ""
            found.append(f"{end[0]}{share}: {end[1]}")
        return found


# -- the table ---------------------------------------------------------------------------------------------------------


def heads(summaries: Sequence[Summary], metrics: Sequence[Metric]) -> list[str]:
    """The heads of the columns after the plan's name."""
    names = [metric.name for metric in metrics]
    return ["time", "ratio", f"{unit(summaries)}/s", "memory", *names, "start-up"]


def unit(summaries: Sequence[Summary]) -> str:
    """The unit of speeds: "samples" where they are known in every run that finished, else "updates"."""
    counts = set().union(*(summary.counts for summary in summaries))
    return "samples" if counts and all(samples is not None for _, samples in counts) else "updates"


def rows(summaries: Sequence[Summary], metrics: Sequence[Metric]) -> Iterator[list[tuple[str, str]]]:
    """A row a plan of cells for `heads`: a text, and the range of the runs, or ""."""
    base = next((summary.speed for summary in summaries if summary.speed), None)
    for summary in summaries:
        speed = summary.speed
        yield [
            _cell(summary.seconds, seconds),
            (ratio(base.median / speed.median) if speed and base else "–", ""),
            (_cell(speed, rate)[0], ""),  # its range is that of the time
            (_cell(summary.peak, size)[0], ""),
            *(_cell(summary.final(metric), metric.text) for metric in metrics),
            (_cell(summary.before, seconds)[0], ""),
        ]


def _cell(number: Spread | None, say: Callable[[float], str]) -> tuple[str, str]:
    if number is None:
        return "–", ""
    apart = say(number.least) != say(number.most)
    return say(number.median), f"{say(number.least)} … {say(number.most)}" if apart else ""


def seconds(value: float | None) -> str:
    """``"0.123 s"``, ``"12.3 s"``, ``"2 min 05 s"``, ``"3 h 20 min"``."""
    if value is None:
        return "–"
    if value < 99.95:
        return f"{value:.3g} s" if value < 9.995 else f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def ratio(value: float) -> str:
    """``"0.62"``, ``"1.31"``, ``"12"``."""
    return f"{value:.2f}" if value < 9.95 else f"{value:.0f}"


def rate(value: float) -> str:
    """``"5,120"``, ``"51.2"``."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
