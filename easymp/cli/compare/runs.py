"""Runs of plans, and the verdict on them: which plan to take, and how sure that is.

The speeds of two plans differ where the 90 % interval of their ratio excludes 1. It is the interval of the exact rank
test (Mann, Whitney: On a test of whether one of two random variables is stochastically larger than the other, 1947;
Bauer: Constructing confidence sets using rank statistics, 1972): no distribution is assumed, and both plans need three
runs. Fewer runs give a hint where they do not overlap and differ by a tenth or more.

The reference is the first plan with a finite result. Another plan follows it where the interval of the difference of
each compared loss and accuracy ends within a tolerance: half a point of a share, a twentieth of other numbers. A plan
is worse where the accuracy (without one, the loss) is worse by more than that, and unproven in all other cases.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import truediv
from pathlib import Path
from typing import Any

from ...errors import SettingError, nearest
from ...settings import LAUNCHING, NAMES, TABLES, checked
from ..harness import FINISHED, INTERRUPTED, End, Script
from ..plot import Point

PROCESSES = "processes"
SHORT_NAMES = {"gradient_accumulation_steps": "accumulation", "activation_checkpointing": "checkpointing"}
FEW = 4  # scalars, up to which all of them are columns
# Last words of names such as "eval/accuracy", "val_acc" and "top5", and whether more or less is better.
HIGHER = set("accuracy acc f1 auc auroc bleu rouge iou miou dice recall top psnr ssim r2".split())
LOWER = set("loss perplexity ppl error err wer cer mse rmse mae nll fid".split())
SHARES = {"accuracy", "acc", "top", "recall", "error", "wer", "cer", "f1"}  # from 0 to 1, shares of samples
NOISY = 40  # logged values from which on a curve is of single batches: its end is the mean of the last 5 %
ENOUGH = 3  # runs of both plans, from which on there is an interval
CHANCE = 20  # the rank test allows an error in 1 of 20 cases on each side
HINT_RATIO = 1 / 0.9  # of speeds that few runs must reach for a hint
SHARE_TOLERANCE, TOLERANCE = 0.005, 0.05
NO, HINT, YES = range(3)  # how sure a difference of speeds is
REFERENCE, FOLLOWS, UNPROVEN, WORSE = "reference", "follows", "unproven", "worse"


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


def name_and_folder(argument: str) -> tuple[str, Path]:
    """Split NAME=FOLDER into the plan's name and the folder. FOLDER alone is named after itself."""
    name, equals, folder = argument.partition("=")
    if not equals or Path(argument).exists():
        name, folder = "", argument
    return name or Path(folder).resolve().name, Path(folder)


def load(arguments: Sequence[str]) -> list[Run]:
    """The runs that were recorded in FOLDER or NAME=FOLDER. Those of one NAME are of one plan."""
    plans: dict[str, Variant] = {}
    runs: list[Run] = []
    for argument in arguments:
        name, folder = name_and_folder(argument)
        record = read(folder)
        if record is None:
            raise SettingError(f"{folder} has no recorded run: EASYMP_RECORD={folder} python train.py records one")
        variant = plans.setdefault(name, Variant(name))
        number = 1 + sum(run.variant is variant for run in runs)
        end = End(FINISHED, "", record.start, (record.first or 0.0) + (record.seconds or 0.0))
        runs.append(Run(variant, number, None, end, record))
    return runs


# -- the verdict


@dataclass(frozen=True)
class Standing:
    """One plan in the verdict."""

    name: str
    ratio: float | None = None  # its time for as much work over the recommended plan's; None: it did not finish
    interval: tuple[float, float] | None = None  # the 90 % interval of `ratio`; None for fewer than three runs
    sure: int = NO  # how sure it is that the recommended plan is faster, from 0 (not) over 1 (a hint) to 2
    result: str = ""  # "reference", "follows", "unproven" or "worse"; "" where it did not finish
    reason: str = ""  # the numbers behind "worse"


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
    """Whether the plan's metrics follow those of `reference`; where the first one is worse, the numbers, too."""
    if plan is reference:
        return REFERENCE, ""
    results = [_compare_metric(reference.finals(metric), plan.finals(metric), metric) for metric in metrics]
    if not results or results[0] != WORSE:
        return FOLLOWS if results and set(results) == {FOLLOWS} else UNPROVEN, ""
    metric = metrics[0]
    if not plan.finals(metric):
        return WORSE, f"{plan.name} did not log {metric.name}"
    value, expected = (metric.text(median(summary.finals(metric))) for summary in (plan, reference))
    return WORSE, f"{metric.name} {value} ({reference.name}: {expected})"


def _compare_metric(expected: Sequence[float], values: Sequence[float], metric: Metric) -> str:
    """Whether the last `values` of some runs follow those that are `expected`."""
    if not expected or not values:
        return WORSE if expected else UNPROVEN
    target = median(expected)
    if not all(map(math.isfinite, (*expected, *values))):
        return WORSE if math.isfinite(target) else UNPROVEN
    tolerance = SHARE_TOLERANCE if metric.share else TOLERANCE * abs(target)
    bounds = interval(expected, values, lambda a, b: (a - b) * metric.direction)
    if bounds is not None and bounds[1] <= tolerance:
        return FOLLOWS
    is_worse = (target - median(values)) * metric.direction > tolerance
    return WORSE if is_worse and (bounds is None or bounds[0] > 0) else UNPROVEN


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
    """``"Use fp32: bf16 took 1.30 × as long (5 runs each)."``, and how sure that is."""
    finished = sorted((s for s in standings if s.ratio), key=lambda s: s.ratio or 0.0)
    winner = next(s for s in finished if s.name == recommended)
    rejected = [s for s in finished if s.result == WORSE and (s.ratio or 0.0) < 1]
    rivals = [s for s in finished if s is not winner and s not in rejected]
    sure = min((s.sure for s in rivals), default=YES)
    reason = f"{rivals[0].name} took {ratio_text(rivals[0])} × as long" if rivals else "its results are not worse"
    if sure == NO:
        reason = f"no other plan is shown to be faster; {reason}"
    runs = f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
    head = f"{'Probably use' if sure == HINT else 'Use'} {recommended}"
    head += " if its results are good enough" if winner.result == UNPROVEN else ""
    clauses = [f"{s.name} took {ratio_text(s)} × as long, but is worse: {s.reason}" for s in rejected]
    head += f": {reason} ({runs} run{'s' if counts[-1] > 1 else ''} each)"
    return "; ".join([head, *clauses]) + ".", sure


def ratio_text(standing: Standing) -> str:
    """``"0.62"``, ``"1.31"``, ``"12"``; ``"–"`` where the plan did not finish."""
    if standing.ratio is None:
        return "–"
    return f"{standing.ratio:.2f}" if standing.ratio < 9.95 else f"{standing.ratio:.0f}"
