"""Runs a script under each plan, in turn, and keeps what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .metrics import Metric, choose
from .records import read
from .running import INTERRUPTED, Task, run
from .summaries import Run, Summary, summarise
from .variants import Variant
from .verdict import Verdict, judge


@dataclass(frozen=True)
class Comparison:
    """All runs, and what they show.

    Attributes:
        task: what was run.
        repeats: how often each plan was to run.
        summaries: by plan, in the order given.
        metrics: what is compared of what the script logged.
        missing: names that were asked for and that no run logged.
        folder: where records, output and reports lie.
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
        """Facts of the machine, as the first run with a record told them."""
        return next(
            (run.record.machine for summary in self.summaries for run in summary.runs if run.record), {}
        )


def compare(
    task: Task,
    variants: Sequence[Variant],
    folder: Path,
    *,
    repeats: int = 1,
    seed: int | None = None,
    metrics: Sequence[str] = (),
    tell: Callable[[Variant, int, Run | None], None] = lambda variant, number, run: None,
) -> Comparison:
    """Run `task` under each of `variants`, `repeats` times, round by round, so that what changes on the machine meets all of them.

    Args:
        folder: gets a folder a run, and in each the project's, so that no run resumes another; made, and must be empty.
        seed: of the first round; each round counts one up, so that runs of a plan differ by it. None leaves it to the script.
        metrics: names of logged values to compare; by default loss and accuracy, or all of a few.
        tell: called before each run, with None, and after it.

    A run that fails does not stop the others. After an interruption, what is done is kept.
    """
    runs: list[Run] = []
    interrupted = False
    for number in range(1, repeats + 1):
        for index, variant in enumerate(variants):
            tell(variant, number, None)
            place = folder / "runs" / f"{index + 1}-{_safe(variant.name)}-{number}"
            its_seed = None if seed is None else seed + number - 1
            end = run(task, variant, place, its_seed)
            runs.append(Run(variant, number, its_seed, end, read(place)))
            tell(variant, number, runs[-1])
            if end.status == INTERRUPTED:
                interrupted = True
                break
        if interrupted:
            break
    return conclude(task, variants, runs, folder, repeats=repeats, metrics=metrics, interrupted=interrupted)


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
    """What `runs` show."""
    summaries = summarise(variants, runs)
    logged = [name for run in runs if run.record is not None for name in run.record.curves]
    chosen = choose(logged, metrics)
    cores = next((run.record.machine.get("threads") for run in runs if run.record is not None), None)
    return Comparison(
        task=task,
        repeats=repeats,
        summaries=tuple(summaries),
        metrics=tuple(chosen),
        missing=tuple(name for name in metrics if name not in logged),
        verdict=judge(summaries, [metric for metric in chosen if metric.name in logged], cores),
        folder=folder,
        interrupted=interrupted,
    )


def _safe(name: str) -> str:
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name)
