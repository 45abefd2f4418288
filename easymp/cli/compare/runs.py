"""Plans and their runs: the settings of each plan, the records that ranks wrote, metrics, and a summary a plan."""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import SettingError, nearest
from ...settings import LAUNCHING, NAMES, TABLES, checked
from .. import plot
from ..harness import FINISHED, End, Script
from ..plot import Point

PROCESSES = "processes"
SHORT_NAMES = {"gradient_accumulation_steps": "accumulation", "activation_checkpointing": "checkpointing"}
FEW = 4  # scalars, up to which all of them are columns
# Last words of names such as "eval/accuracy", "val_acc" and "top5", and whether more or less is better.
HIGHER = set("accuracy acc f1 auc auroc bleu rouge iou miou dice recall top psnr ssim r2".split())
LOWER = set("loss perplexity ppl error err wer cer mse rmse mae nll fid".split())
SHARES = {"accuracy", "acc", "top", "recall", "error", "wer", "cer", "f1"}  # from 0 to 1, shares of samples
NOISY = 40  # logged values from which on a curve is of single batches: its end is the mean of the last 5 %


@dataclass(frozen=True)
class Variant:
    """One plan to run the script under."""

    name: str  # its differences from the other plans
    settings: Mapping[str, str] = field(default_factory=dict)  # as text; they win over the script's own
    processes: int | None = None  # None: one an accelerator, or one without any
    placeholders: Mapping[str, str] = field(default_factory=dict)  # for ``{name}`` among the script's arguments

    def command(self, script: Script) -> list[str]:
        arguments = list(script.arguments)
        for name, value in self.placeholders.items():
            arguments = [argument.replace(f"{{{name}}}", value) for argument in arguments]
        return script._replace(arguments=arguments).launch(self.processes)


def variants(options: Mapping[str, Sequence[str]], arguments: Sequence[str] = ()) -> list[Variant]:
    """Every combination of the values, in order; an empty value leaves that choice to the script."""
    placeholders = sorted(name for name in options if any(f"{{{name}}}" in argument for argument in arguments))
    fields = {**NAMES, PROCESSES: LAUNCHING[PROCESSES]}
    del fields["project_dir"]  # each run has its own
    for name, values in options.items():
        if len(set(values)) < len(values):
            raise SettingError(f"{name}={','.join(values)}: a value is there twice; --repeats runs each again")
        table, dot, _ = name.partition(".")
        if name in placeholders or (dot and table in TABLES):
            continue  # the script's, or the strategy's, to check
        if name not in fields:
            hint = nearest(name, fields) or "."
            raise SettingError(
                f"{name!r} cannot be varied{hint} Known: {', '.join(fields)}, options as strategy_options.OPTION, and "
                f"names in braces among the script's own arguments, as in: --vary {name}=1,2 -- --some-flag {{{name}}}"
            )
        for value in filter(None, values):
            checked(fields[name], value, f"{name}=")
    differing = [name for name, values in options.items() if len(values) > 1] or list(options)[:1]
    plans = []
    for combination in itertools.product(*options.values()):
        values_by_name = dict(zip(options, combination))
        labels = []
        for name, value in values_by_name.items():
            short_name = SHORT_NAMES.get(name, name.rpartition(".")[2])
            label = f"{short_name}={value}" if value else f"{short_name} as it is"
            if name == PROCESSES and value:
                label = f"{value} process{'es' * (value != '1')}"
            elif name in ("mixed_precision", "strategy") and value:
                label = value
            if name in differing:
                labels.append(label)
        replaced = {name: values_by_name.pop(name) for name in placeholders}
        processes = values_by_name.pop(PROCESSES, "")
        settings = {name: value for name, value in values_by_name.items() if value}
        plans.append(Variant(" ".join(labels) or "as it is", settings, int(processes) if processes else None, replaced))
    return plans


# -- records


@dataclass(frozen=True)
class Record:
    """One training, as its ranks recorded it (`easymp.trackers.recorder`); None is unknown.

    Of several Accelerators in a script, the one with the most updates.
    """

    start: float  # seconds since the epoch, when the Accelerator was made
    first: float | None  # seconds from there to the end of the first update
    seconds: float | None  # from the end of the first update to that of the last
    updates: int  # between the two
    curves: Mapping[str, Sequence[Point]]  # logged values by name; seconds count from the end of the first update
    plan: Mapping[str, Any]
    machine: Mapping[str, Any] = field(default_factory=dict)
    samples: int | None = None  # of all ranks, in `seconds`
    peak: int | None = None  # bytes of the rank that had most
    memory: Sequence[tuple[float, int]] = ()  # that rank's bytes over the seconds since the first update
    device_memory: bool = False  # allocated on the device, and not resident in the process
    complete: bool = True


class _Training(dict[str, list[dict[str, Any]]]):
    """The lines from one ``begin`` to the next, by event."""

    def latest(self, event: str, key: str, default: Any = None) -> Any:
        return self[event][-1].get(key, default) if event in self else default

    @property
    def updates(self) -> int:
        counts = [int(self.latest(event, "updates", 0)) for event in ("first", "memory", "end")]
        return max(counts)

    @property
    def peak(self) -> int:
        sizes = [int(line["bytes"]) for line in self.get("memory", [])]
        return max([int(self.latest("end", "peak", 0)), *sizes])


def read(folder: Path) -> Record | None:
    """The record in `folder`; None where no Accelerator was made. Lines that a killed run cut short are left out."""
    ranks = {path.name: _read_trainings(path) for path in sorted(folder.glob("rank-*.jsonl"))}
    trainings = ranks.get("rank-0.jsonl")
    if not trainings:
        return None
    number = max(range(len(trainings)), key=lambda i: trainings[i].updates)
    training, begin = trainings[number], trainings[number]["begin"][0]
    fullest = max((rank[number] for rank in ranks.values() if len(rank) > number), key=lambda rank: rank.peak)
    zero = training.latest("first", "at", 0.0)
    curves: dict[str, list[Point]] = {}
    for line in training.get("log", []):
        for name, value in line["values"].items():
            point = Point(int(line["updates"]), round(line["at"] - zero, 4), float(value))
            curves.setdefault(name, []).append(point)
    complete = "end" in training
    samples = training.latest("first", "samples"), training.latest("end" if complete else "memory", "samples")
    seconds = training.latest("end", "seconds")
    if seconds is None:
        seconds = training.latest("memory", "at", zero) - zero
    return Record(
        start=float(begin["time"]),
        first=training.latest("first", "at"),
        seconds=float(seconds) if training.updates > 1 else None,
        updates=max(0, training.updates - 1),
        samples=None if None in samples else int(samples[1]) - int(samples[0]) or None,
        peak=fullest.peak,
        device_memory=begin.get("memory") == "device",
        memory=[(round(line["at"] - zero, 3), int(line["bytes"])) for line in fullest.get("memory", [])],
        curves=curves,
        plan=training.latest("end", "plan") or begin.get("plan", {}),
        machine=begin.get("machine", {}),
        complete=complete,
    )


def _read_trainings(path: Path) -> list[_Training]:
    trainings: list[_Training] = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if line["event"] == "begin":
            trainings.append(_Training())
        if trainings:
            trainings[-1].setdefault(line["event"], []).append(line)
    return trainings


# -- metrics


@dataclass(frozen=True)
class Metric:
    """One logged number."""

    name: str

    @property
    def direction(self) -> int:
        """1 where more is better, -1 where less is, 0 where unknown."""
        key = _key_word(self.name)
        return 1 if key in HIGHER else -1 if key in LOWER else 0

    @property
    def share(self) -> bool:
        """Whether values from 0 to 1 are shares of samples."""
        return _key_word(self.name) in SHARES

    def text(self, value: float) -> str:
        """``"98.71%"`` for a share, four significant digits for others."""
        if self.share and 0 <= value <= 1:
            return f"{value:.2%}"
        return f"{value:.4g}" if math.isfinite(value) else str(value)

    def final(self, values: Sequence[float]) -> float:
        count = max(1, len(values) // 20) if len(values) > NOISY else 1
        return sum(values[-count:]) / count


def choose(logged: Iterable[str], requested: Sequence[str] = ()) -> list[Metric]:
    """The metrics to compare: the requested ones, or one loss and one accuracy, or all of a few that were logged."""
    if requested:
        return list(map(Metric, requested))
    names, defaults = list(dict.fromkeys(logged)), list[str]()
    for keys in ({"loss"}, {"accuracy", "acc"}):
        candidates = [name for name in names if _key_word(name) in keys]
        defaults += sorted(candidates, key=lambda name: len(_split(name)) > 1)[:1]  # the plain name, or the first
    return [Metric(name) for name in dict.fromkeys([*defaults, *(names if len(names) <= FEW else [])])]


def _split(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())


def _key_word(name: str) -> str:
    """The last word of a name; "top" of "top5", and "f1" of "f1"."""
    last = next(reversed(_split(name)), "")
    return last if last in HIGHER | LOWER else last.rstrip("0123456789")


# -- runs


@dataclass(frozen=True)
class Run:
    """One run of one plan; `number` counts the plan's runs from 1."""

    variant: Variant
    number: int
    seed: int | None
    end: End
    record: Record | None

    @property
    def finished(self) -> Record | None:
        return self.record if self.end.status == FINISHED else None

    @property
    def startup(self) -> float | None:
        """Seconds from the start of the processes to the end of the first update: imports, data, warm-up."""
        if self.record is None or self.record.first is None:
            return None
        return self.record.start - self.end.started + self.record.first


def median(values: Sequence[float]) -> float:
    """The median; NaN where a value is NaN."""
    return math.nan if any(map(math.isnan, values)) else statistics.median(values)


@dataclass(frozen=True)
class Summary:
    """A plan and its runs. Numbers are those of the runs that finished, as far as they are known."""

    variant: Variant
    runs: tuple[Run, ...]
    unit: str = "samples"  # of speeds, or "updates" where a run of some plan does not know its samples

    @property
    def name(self) -> str:
        return self.variant.name

    @property
    def records(self) -> list[Record]:
        return [run.finished for run in self.runs if run.finished is not None]

    @property
    def speeds(self) -> list[float]:
        """Samples or updates a second, of each run that was timed."""
        counts = [(r.samples if self.unit == "samples" else r.updates, r.seconds) for r in self.records]
        return [count / seconds for count, seconds in counts if count and seconds]

    @property
    def speed(self) -> float:
        return median(self.speeds)

    @property
    def seconds(self) -> list[float]:
        return [record.seconds for record in self.records if record.seconds is not None]

    @property
    def startups(self) -> list[float]:
        return [run.startup for run in self.runs if run.finished and run.startup is not None]

    @property
    def peaks(self) -> list[float]:
        return [record.peak for record in self.records if record.peak is not None]

    @property
    def counts(self) -> set[tuple[int, int | None]]:
        """Updates and samples that were timed, of each run."""
        return {(record.updates, record.samples) for record in self.records}

    def finals(self, metric: Metric) -> list[float]:
        curves = [record.curves.get(metric.name, ()) for record in self.records]
        return [metric.final([point.value for point in curve]) for curve in curves if curve]

    @property
    def typical(self) -> Run | None:
        """The finished run with the median time, drawn for all in a plot; else any run that has a record."""
        times = sorted(self.seconds)
        median_time = times[(len(times) - 1) // 2] if times else None
        runs = [run for run in self.runs if run.record and (not times or run.record.seconds == median_time)]
        return runs[0] if runs else None

    @property
    def problems(self) -> list[str]:
        """``"failed (2 of 3 runs): the reason"``, once for runs that ended alike."""
        ends = [(run.end.status, run.end.why) for run in self.runs if run.end.status != FINISHED]
        share = " ({} of {} runs)" if len(self.runs) > 1 else ""
        return [f"{end[0]}{share.format(ends.count(end), len(self.runs))}: {end[1]}" for end in dict.fromkeys(ends)]


def summarize(runs: Sequence[Run]) -> tuple[Summary, ...]:
    records = [run.finished for run in runs if run.finished and run.finished.updates]
    unit = "samples" if all(record.samples for record in records) else "updates"
    plans = list({id(run.variant): run.variant for run in runs}.values())
    return tuple(Summary(plan, tuple(run for run in runs if run.variant is plan), unit) for plan in plans)


# -- runs that exist


def is_run(argument: str) -> bool:
    """Whether `argument` is a run that exists, as PATH or NAME=PATH: a folder, or a file of rows."""
    path = path_of(argument)
    return path.is_dir() or (path.suffix == ".jsonl" and path.is_file())


def load(arguments: Sequence[str]) -> list[Run]:
    """The runs at PATH or NAME=PATH: recordings, or rows of log_with="jsonl". Those of one NAME are of one plan."""
    plans: dict[str, Variant] = {}
    runs: list[Run] = []
    for argument in arguments:
        name, path = _name_and_path(argument)
        recording = read(path) if path.is_dir() else None
        records = (
            {path.resolve().name: recording} if recording else {r.name: _record_of_rows(r) for r in plot.read([path])}
        )
        for run_name, record in records.items():
            variant = plans.setdefault(name or run_name, Variant(name or run_name))
            number = 1 + sum(run.variant is variant for run in runs)
            end = End(FINISHED, "", record.start, (record.first or 0.0) + (record.seconds or 0.0))
            runs.append(Run(variant, number, None, end, record))
    return runs


def path_of(argument: str) -> Path:
    return _name_and_path(argument)[1]


def _name_and_path(argument: str) -> tuple[str, Path]:
    name, equals, path = argument.partition("=")
    return (name, Path(path)) if equals and not Path(argument).exists() else ("", Path(argument))


def _record_of_rows(run: plot.Run) -> Record:
    """The record of a run that only logged: its updates are the steps of its rows; memory and samples are unknown."""
    points = [point[:2] for curve in run.curves.values() for point in curve] or [(0, 0.0)]
    (first_step, first), (last_step, last) = min(points), max(points)
    curves = {name: [p._replace(seconds=p.seconds - first) for p in curve] for name, curve in run.curves.items()}
    plan = {name: {"value": value, "reason": ""} for name, value in run.config.items()}
    return Record(run.start, first, (last - first) or None, last_step - first_step, curves, plan)
