"""Runs of the script: their processes and ends, the records that their ranks wrote (`easymp.trackers.recorder`), and summaries a plan."""

from __future__ import annotations

import itertools
import json
import math
import re
import resource
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from ...base import env
from ...errors import SettingError, nearest
from ...settings import LAUNCHING, NAMES, OVERRIDE, RECORD, TABLES, checked
from .. import plot

GRACE = 40.0  # seconds to end in after SIGTERM: more than the launcher gives its ranks
FAILED = re.compile(r"^rank \d+ of \d+ failed first: (.*)$", re.MULTILINE)
POLL = 0.2  # seconds between two looks at a running script
TAIL = 1 << 16  # bytes of output in which the reason of a failure is looked for
PROCESSES = "processes"
SHORT = {"gradient_accumulation_steps": "accumulation", "activation_checkpointing": "checkpointing"}
FINISHED, FAILURE, LATE, INTERRUPTED = "finished", "failed", "timed out", "interrupted"
FEW = 4  # scalars, up to which all of them are columns
# Last words of names such as "eval/accuracy", "val_acc" and "top5", and whether more or less is better.
HIGHER = set("accuracy acc f1 auc auroc bleu rouge iou miou dice recall top psnr ssim r2".split())
LOWER = set("loss perplexity ppl error err wer cer mse rmse mae nll fid".split())
SHARES = {"accuracy", "acc", "top", "recall", "error", "wer", "cer", "f1"}  # from 0 to 1, shares of samples
HELD_OUT = {"eval", "val", "valid", "validation", "test", "dev"}
SCATTER = 40  # logged values from which on a curve is of single batches: its end is the mean of the last 5 %
BUSY_TIMES = ("user", "nice", "system", "irq", "softirq", "steal")  # of psutil.cpu_times


@dataclass(frozen=True)
class Variant:
    """One plan to run the script under."""

    name: str  # its differences from the other plans
    settings: Mapping[str, str] = field(default_factory=dict)  # as text; they win over the script's own
    processes: int | None = None  # None: one an accelerator, or one without any
    words: Mapping[str, str] = field(default_factory=dict)  # for ``{name}`` among the script's arguments

    def override(self, **more: str) -> str:
        """The settings, and `more`, as EASYMP_OVERRIDE takes them."""
        return " ".join(f"{name}={shlex.quote(value)}" for name, value in {**self.settings, **more}.items())


def variants(varied: Mapping[str, Sequence[str]], arguments: Sequence[str] = ()) -> list[Variant]:
    """Every combination of the values, in order; an empty value leaves that choice to the script."""
    in_words = {name for name in varied if any(f"{{{name}}}" in word for word in arguments)}
    known = {**NAMES, PROCESSES: LAUNCHING[PROCESSES]}
    del known["project_dir"]  # each run has its own
    for name, values in varied.items():
        if len(set(values)) < len(values):
            raise SettingError(f"{name}={','.join(values)}: one is there twice; --repeats runs each again")
        table, dot, _ = name.partition(".")
        if name in in_words or (dot and table in TABLES):
            continue  # the script's, or the strategy's, to check
        if name not in known:
            near = nearest(name, known) or "."
            raise SettingError(
                f"{name!r} cannot be varied{near} Known: {', '.join(known)}, options as strategy_options.OPTION, and names in braces "
                f"among the script's own arguments, as in: --vary {name}=1,2 -- --some-flag {{{name}}}"
            )
        for value in filter(None, values):
            checked(known[name], value, f"{name}=")
    apart = [name for name, values in varied.items() if len(values) > 1] or list(varied)[:1]
    found = []
    for values in itertools.product(*varied.values()):
        chosen = dict(zip(varied, values))
        settings = {n: v for n, v in chosen.items() if v and n != PROCESSES and n not in in_words}
        count, words = chosen.get(PROCESSES), {name: chosen[name] for name in sorted(in_words)}
        name = " ".join(_said(name, chosen[name]) for name in apart) or "as it is"
        found.append(Variant(name, settings, int(count) if count else None, words))
    return found


def _said(name: str, value: str) -> str:
    if name == PROCESSES and value:
        return f"{value} process{'es' * (value != '1')}"
    if name in ("mixed_precision", "strategy") and value:
        return value
    short = SHORT.get(name, name.rpartition(".")[2])
    return short + (f"={value}" if value else " as it is")


class Task(NamedTuple):
    """The script: its path (with `module` its name), its own arguments, and the seconds that a run may take."""

    script: str
    arguments: Sequence[str] = ()
    module: bool = False
    timeout: float | None = None

    def command(self, variant: Variant) -> list[str]:
        """The words that start a run."""
        processes = [] if variant.processes is None else ["--processes", str(variant.processes)]
        launch = [sys.executable, "-m", "easymp", "launch", *processes]
        own = list(self.arguments)
        for name, value in variant.words.items():
            own = [word.replace(f"{{{name}}}", value) for word in own]
        return [*launch, *["-m"] * self.module, self.script, *own]


@dataclass(frozen=True)
class End:
    """How a run ended."""

    status: str  # "finished", "failed", "timed out" or "interrupted"
    why: str  # a sentence where it did not finish; else ""
    started: float  # seconds since the epoch
    wall: float  # seconds in all
    # Processors that other work used meanwhile, on average; None where that is not known.
    others: float | None


def run(task: Task, variant: Variant, folder: Path, seed: int | None, tell: Callable[[], None]) -> End:
    """Run the script to its end, and put its record and ``output.txt`` into `folder`, which is made.

    `tell` is called several times a second. An interruption (KeyboardInterrupt) stops the run and is an end like others.
    """
    own = {"project_dir": str(folder / "project")} | ({} if seed is None else {"seed": str(seed)})
    override = " ".join(filter(None, [env.read(OVERRIDE), variant.override(**own)]))
    folder.mkdir(parents=True)
    before, started, begun = _others(), time.time(), time.perf_counter()
    with open(folder / "output.txt", "wb") as output:
        process = subprocess.Popen(
            task.command(variant),
            env=env.merged({OVERRIDE: override, RECORD: str(folder)}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C comes to this process only, and a stopped run gets one signal
        )
        try:
            status = LATE
            while task.timeout is None or time.perf_counter() - begun < task.timeout:
                try:
                    status = FINISHED if process.wait(POLL) == 0 else FAILURE
                    break
                except subprocess.TimeoutExpired:
                    tell()
        except KeyboardInterrupt:
            status = INTERRUPTED
        if status in (LATE, INTERRUPTED):
            _stop(process)
    wall = time.perf_counter() - begun
    why = {
        LATE: f"stopped after {task.timeout or 0:g} seconds (--timeout)",
        INTERRUPTED: "stopped by a signal",
    }
    said = _reason(folder / "output.txt", process.returncode) if status == FAILURE else why.get(status, "")
    return End(status, said, started, wall, max(0.0, _others() - before) / wall)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, which the launcher passes on; after GRACE, or a second Ctrl-C, SIGKILL to all that are left."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        family = []
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
    finally:
        for member in family:
            try:
                member.kill()
            except psutil.Error:  # it has ended
                continue
        process.wait()


def _reason(path: Path, code: int) -> str:
    """Why a run failed: the launcher's sentence, the last line of the output, or the exit code."""
    with open(path, "rb") as output:
        output.seek(max(0, output.seek(0, 2) - TAIL))
        text = output.read().decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [f"exit code {code}", *lines[-1:], *FAILED.findall(text)[-1:]][-1]


def _others() -> float:
    """Seconds of processors that others than this process and its ended children have used so far, on the whole machine."""
    spent = psutil.cpu_times()
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    busy = sum(getattr(spent, name, 0.0) for name in BUSY_TIMES)
    return busy - sum(use.ru_utime + use.ru_stime for use in own)


class Point(NamedTuple):
    """A logged value."""

    update: int  # updates made by then
    seconds: float  # since the end of the first update; negative before it
    value: float


@dataclass(frozen=True)
class Record:
    """One training, as its ranks recorded it; None is unknown."""

    begun: float  # seconds since the epoch, when the Accelerator was made
    first: float | None  # seconds from there to the end of the first update
    seconds: float | None  # from the end of the first update to that of the last
    updates: int  # between the two
    curves: dict[str, list[Point]]  # logged values by name
    plan: dict[str, Any]
    machine: dict[str, Any] = field(default_factory=dict)
    samples: int | None = None  # of all ranks, in `seconds`
    peak: int | None = None  # bytes of the rank that had most
    memory: Sequence[tuple[float, int]] = ()  # that rank's bytes over the seconds since the first update
    device_memory: bool = False  # allocated on the device, and not resident in the process
    trainings: int = 1  # how many Accelerators the script made; this is the one with the most updates
    ended: bool = True


class _Training(dict[str, list[dict[str, Any]]]):
    """The lines from one ``begin`` to the next, by event."""

    def last(self, event: str, key: str, default: Any = None) -> Any:
        return self[event][-1].get(key, default) if event in self else default

    @property
    def updates(self) -> int:
        return max(int(self.last(event, "updates", 0)) for event in ("first", "memory", "end"))

    @property
    def peak(self) -> int:
        return max([int(self.last("end", "peak", 0)), *(line["bytes"] for line in self.get("memory", []))])


def read(folder: Path) -> Record | None:
    """The record in `folder`; None where no Accelerator was made. Lines that a killed run cut short are left out."""
    ranks = {path.name: _trainings(path) for path in sorted(folder.glob("rank-*.jsonl"))}
    main = ranks.get("rank-0.jsonl")
    if not main:
        return None
    chosen = max(range(len(main)), key=lambda i: main[i].updates)
    one, begin = main[chosen], main[chosen]["begin"][0]
    fullest = max((found[chosen] for found in ranks.values() if len(found) > chosen), key=lambda it: it.peak)
    zero = one.last("first", "at", 0.0)
    curves: dict[str, list[Point]] = {}
    for line in one.get("log", []):
        for name, value in line["values"].items():
            point = Point(int(line["updates"]), round(line["at"] - zero, 4), float(value))
            curves.setdefault(name, []).append(point)
    samples = one.last("first", "samples"), one.last("end" if "end" in one else "memory", "samples")
    timed = one.last("end", "seconds")
    seconds = one.last("memory", "at", zero) - zero if timed is None else timed
    return Record(
        begun=float(begin["time"]),
        first=one.last("first", "at"),
        seconds=float(seconds) if one.updates > 1 else None,
        updates=max(0, one.updates - 1),
        samples=None if None in samples else int(samples[1]) - int(samples[0]) or None,
        peak=fullest.peak,
        device_memory=begin.get("memory") == "device",
        memory=[(round(line["at"] - zero, 3), int(line["bytes"])) for line in fullest.get("memory", [])],
        curves=curves,
        plan=dict(one.last("end", "plan") or begin.get("plan", {})),
        machine=dict(begin.get("machine", {})),
        trainings=len(main),
        ended="end" in one,
    )


def _trainings(path: Path) -> list[_Training]:
    found: list[_Training] = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if line["event"] == "begin":
            found.append(_Training())
        if found:
            found[-1].setdefault(line["event"], []).append(line)
    return found


# -- metrics


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
    """A plan and its runs. Numbers are those of the runs that finished, as far as they are known."""

    variant: Variant
    runs: tuple[Run, ...]
    unit: str = "samples"  # of speeds, or "updates" where a run of some plan does not know its samples

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
    def paces(self) -> list[float]:
        """Seconds an update."""
        return [r.seconds / r.updates for r in self.records if r.seconds and r.updates]

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
    curves = {n: [Point(step, at - first, value) for step, at, value in c] for n, c in run.points.items()}
    plan = {name: {"value": value, "reason": ""} for name, value in run.config.items()}
    return Record(run.began, first, (last - first) or None, ended - begun, curves, plan)
