"""The runs of each plan taken together: medians and spreads of time, memory and logged metrics."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import plot
from .runs import FINISHED, End, Point, Record, Variant, read

FEW = 4  # scalars, up to which all of them are columns
# Last words of names such as "eval/accuracy", "val_acc" and "top5", and whether more or less is better.
HIGHER = set("accuracy acc f1 auc auroc bleu rouge iou miou dice recall top psnr ssim r2".split())
LOWER = set("loss perplexity ppl error err wer cer mse rmse mae nll fid".split())
SHARES = {"accuracy", "acc", "top", "recall", "error", "wer", "cer", "f1"}  # from 0 to 1, shares of samples
HELD_OUT = {"eval", "val", "valid", "validation", "test", "dev"}
SCATTER = 40  # logged values from which on a curve is of single batches: its end is the mean of the last 5 %


# -- metrics -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """One logged number. `better` is 1 where more is better, -1 where less is, 0 where unknown."""

    name: str
    better: int = 0

    def text(self, value: float) -> str:
        """``"98.71%"`` for a share, four significant digits for others."""
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
        """Seconds from the start of the processes to the end of the first update."""
        if self.record is None or self.record.first is None:
            return None
        return self.record.begun - self.end.started + self.record.first


def middle(values: Sequence[float]) -> float:
    """The median; NaN where one of them is NaN."""
    return math.nan if any(map(math.isnan, values)) else statistics.median(values)


@dataclass(frozen=True)
class Summary:
    """A plan and its runs. Numbers are those of the runs that finished, as far as they are known.

    Attributes:
        unit: in which speeds are counted: "samples", or "updates" where a run of some plan does not know its samples.
    """

    variant: Variant
    runs: tuple[Run, ...]
    unit: str = "samples"

    @property
    def name(self) -> str:
        return self.variant.name

    @property
    def records(self) -> list[Record]:
        """Of the runs that finished."""
        return [run.record for run in self.runs if run.end.status == FINISHED and run.record is not None]

    @property
    def speeds(self) -> list[float]:
        """Samples or updates a second, of each run that was timed."""
        counted = [(r.samples if self.unit == "samples" else r.updates, r.seconds) for r in self.records]
        return [count / seconds for count, seconds in counted if count and seconds]

    @property
    def speed(self) -> float:
        return middle(self.speeds)

    @property
    def seconds(self) -> list[float]:
        return [record.seconds for record in self.records if record.seconds is not None]

    @property
    def before(self) -> list[float]:
        """Seconds from the start of the processes to the end of the first update: imports, data, warm-up."""
        return [run.before for run in self.runs if run.end.status == FINISHED and run.before is not None]

    @property
    def peaks(self) -> list[float]:
        return [record.peak for record in self.records if record.peak is not None]

    @property
    def counts(self) -> set[tuple[int, int | None]]:
        """Updates and samples that were timed, of each run."""
        return {(record.updates, record.samples) for record in self.records}

    def finals(self, metric: Metric) -> list[float]:
        """The end of the metric's curve, of each run that logged it."""
        curves = [record.curves.get(metric.name, ()) for record in self.records]
        return [metric.final([point.value for point in curve]) for curve in curves if curve]

    @property
    def typical(self) -> Run | None:
        """The finished run with the median time, drawn for all in a plot; else any run that has a record."""
        known = [run for run in self.runs if run.record is not None]
        timed = [run for run in known if run.end.status == FINISHED and run.record and run.record.seconds]
        timed.sort(key=lambda run: (run.record and run.record.seconds) or 0.0)
        return timed[(len(timed) - 1) // 2] if timed else known[0] if known else None

    @property
    def troubles(self) -> list[str]:
        """``"failed (2 of 3 runs): why"``, once for runs that ended alike."""
        ends = [(run.end.status, run.end.why) for run in self.runs if run.end.status != FINISHED]
        found = []
        for end in dict.fromkeys(ends):
            share = f" ({ends.count(end)} of {len(self.runs)} runs)" if len(self.runs) > 1 else ""
            found.append(f"{end[0]}{share}: {end[1]}")
        return found


def summarize(runs: Sequence[Run]) -> tuple[Summary, ...]:
    """The plans of `runs`, in the order of their first runs."""
    records = [run.record for run in runs if run.end.status == FINISHED and run.record is not None]
    unit = "samples" if all(record.samples for record in records if record.updates) else "updates"
    variants = list({id(run.variant): run.variant for run in runs}.values())
    return tuple(Summary(v, tuple(run for run in runs if run.variant is v), unit) for v in variants)


# -- runs that exist ---------------------------------------------------------------------------------------------------


def is_run(word: str) -> bool:
    """Whether `word` is a run that exists, as PLACE or NAME=PLACE: a folder, or a file of rows."""
    place = _place(word)[1]
    return place.is_dir() or (place.suffix == ".jsonl" and place.is_file())


def load(words: Sequence[str]) -> list[Run]:
    """The runs named by `words`: recordings, or rows as log_with="jsonl" writes them. Those of one NAME are runs of one plan."""
    named: dict[str, Variant] = {}
    runs: list[Run] = []
    for word in words:
        name, place = _place(word)
        recorded = read(place) if place.is_dir() else None
        found = {name or place.resolve().name: recorded} if recorded else {}
        found = found or {run.name: _of_rows(run) for run in plot.read([place])}
        for own, record in found.items():
            variant = named.setdefault(name or own, Variant(name or own))
            number = 1 + sum(run.variant is variant for run in runs)
            end = End(FINISHED, "", record.begun, (record.first or 0.0) + (record.seconds or 0.0), None)
            runs.append(Run(variant, number, None, end, record))
    return runs


def _place(word: str) -> tuple[str, Path]:
    name, equals, path = word.partition("=")
    return (name, Path(path)) if equals and not Path(word).exists() else ("", Path(word))


def _of_rows(run: plot.Run) -> Record:
    """The record of a run that only logged: its updates are the steps of its rows, and memory and samples are unknown."""
    rows = [(step, at) for curve in run.points.values() for step, at, _ in curve] or [(0, 0.0)]
    (begun, first), (ended, last) = min(rows), max(rows)
    curves = {
        name: [Point(step, at - first, value) for step, at, value in curve]
        for name, curve in run.points.items()
    }
    plan = {name: {"value": value, "reason": ""} for name, value in run.config.items()}
    return Record(run.began, first, (last - first) or None, ended - begun, curves, plan)
