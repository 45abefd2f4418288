"""The arithmetic of `easymp compare`: metrics, verdicts and doubts."""

from __future__ import annotations

import math
import operator
import random
from typing import Any

import pytest

from easymp.cli.compare.runs import Comparison, Metric, Run, Variant, choose, interval
from easymp.cli.plot import smooth

from .runs import comparison, run

A, B, C = Variant("fp32"), Variant("bf16"), Variant("O1")


@pytest.mark.parametrize(
    ("names", "metrics"),
    [
        ("loss lr accuracy", "loss accuracy lr"),
        ("lr a b c train_loss eval_loss eval_accuracy", "train_loss eval_accuracy"),
        ("eval/loss a b c d", "eval/loss"),
        ("val/loss loss a b c val_acc train_acc", "loss val_acc"),
        ("a b", "a b"),
        ("a b c d e", ""),
    ],
)
def test_loss_and_accuracy_or_all_of_a_few_are_compared(names: str, metrics: str) -> None:
    assert [metric.name for metric in choose(names.split())] == metrics.split()
    assert [metric.name for metric in choose(names.split(), ["f1", "nothing"])] == ["f1", "nothing"]


def test_only_known_names_have_a_direction() -> None:
    directions = {"loss": -1, "top5": 1, "valAcc": 1, "eval/F1": 1, "perplexity": -1, "lr": 0, "lossless": 0}
    assert {name: Metric(name).direction for name in directions} == directions


def test_a_noisy_curve_ends_with_a_mean_and_is_drawn_as_one() -> None:
    assert Metric("loss").final([5.0] * 20 + [1.0]) == 1.0
    assert Metric("loss").final([5.0] * 98 + [1.0, 2.0, 3.0, 2.0, 2.0]) == pytest.approx(2.0)
    points = [(float(i), float(i % 2)) for i in range(100)]
    *_, (_, mean, _) = smooth(0, points)
    assert [x for x, _ in mean] == [x for x, _ in points] and mean[0] == points[0]
    assert mean[50][1] == pytest.approx(sum(i % 2 for i in range(48, 53)) / 5)


def runs(variant: Variant, seconds: list[float], *accuracies: float, **options: Any) -> list[Run]:
    """A run for each of `seconds`; the last of `accuracies` is that of those without their own."""
    results = []
    for number, duration in enumerate(seconds, 1):
        values = {"accuracy": [accuracies[min(number, len(accuracies)) - 1]]} if accuracies else {}
        results.append(run(variant, duration, number, values=values, **options))
    return results


def compared(*plans: list[Run]) -> Comparison:
    return comparison(*(run for plan in plans for run in plan))


SLOW, FAST, ODD = [10, 10.2, 9.9], [6.2, 6.1, 6.3], [10, 12, 8]
NOT_SHOWN = "Use fp32: no other plan is shown to be faster; bf16 took "
WORSE = "(3 runs each); bf16 took 0.62 × as long, but is worse: accuracy 88.00% (fp32: 98.90%)."


@pytest.mark.parametrize(
    ("fp32", "bf16", "sentence"),
    [
        # three runs that do not overlap are evidence, fewer a hint, less than a tenth nothing
        (runs(A, SLOW, 0.989), runs(B, FAST, 0.987), "Use bf16: fp32 took 1.61 × as long (3 runs each)."),
        (runs(A, FAST, 0.989), runs(B, SLOW, 0.987), "Use fp32: bf16 took 1.61 × as long (3 runs each)."),
        (
            runs(A, [10], 0.989),
            runs(B, [5], 0.987),
            "Probably use bf16 if its results are good enough: fp32 took 2.00 × as long (1 run each).",
        ),
        (runs(A, [10], 0.989), runs(B, [9.5], 0.987), NOT_SHOWN + "0.95 × as long (1 run each)."),
        (runs(A, ODD, 0.9), runs(B, [7, 9, 6], 0.9), NOT_SHOWN + "0.70 ×"),
        (runs(A, SLOW), runs(B, FAST), "Use bf16 if its results are good enough: fp32 took"),
        # a metric that is worse by more than the tolerance, or NaN
        (runs(A, SLOW, 0.989), runs(B, FAST, 0.88), WORSE),
        (runs(A, SLOW, 0.95, 0.97, 0.96), runs(B, FAST, 0.94, 0.945, 0.95), "Use bf16 if its results are good"),
        (runs(A, [10], 0.989), runs(B, [5], math.nan), "but is worse: accuracy nan (fp32: 98.90%)."),
        (runs(A, [10], math.nan), runs(B, [50], 0.9), "Use bf16: its results are not worse"),
        # runs of other lengths are compared by speed
        (runs(A, SLOW, 0.9), runs(B, SLOW, 0.9, samples=2000), "Use bf16: fp32 took 2.00 × as long"),
        (runs(A, [10]), [run(B, None, why="no")], "Only fp32 finished"),
        ([run(A, None)], [run(B, None)], "No plan finished with at least two updates"),
    ],
)  # fmt: skip
def test_the_sentence_is_as_strong_as_its_evidence(fp32: list[Run], bf16: list[Run], sentence: str) -> None:
    assert sentence in compared(fp32, bf16).verdict.sentence


def test_plans_that_are_as_fast_leave_the_choice_to_the_reference_or_a_proven_one() -> None:
    tied = compared(runs(A, [30, 31, 32], 0.9), runs(B, SLOW, 0.9), runs(C, SLOW, 0.89))
    assert tied.verdict.recommended == "bf16"


def test_the_interval_excludes_no_difference_where_the_rank_test_does() -> None:
    stats = pytest.importorskip("scipy.stats")
    assert interval([1, 2], [3, 4], operator.sub) is None
    assert interval([1, 2, 3], [4, 6, 8], operator.sub) == (-7, -1)
    draw = random.Random(0)
    for _ in range(100):
        first, second = ([draw.gauss(shift, 1) for _ in range(draw.randint(3, 7))] for shift in (0, 1.5))
        low, high = interval(first, second, operator.sub) or (0, 0)
        chance = stats.mannwhitneyu(first, second, method="exact").pvalue
        assert (low > 0 or high < 0) == (chance <= 0.1)


def test_a_loss_decides_where_there_is_no_accuracy() -> None:
    better = run(B, 5, values={"loss": [3.0, 1.02], "lr": [1.0]})
    worse = run(C, 4, values={"loss": [3.0, 1.2], "lr": [1.0]})
    verdict = comparison(run(A, 10, values={"loss": [3.0, 1.0], "lr": [1.0]}), better, worse).verdict
    assert verdict.recommended == "bf16"
    assert "O1 took 0.80 × as long, but is worse: loss 1.2 (fp32: 1)." in verdict.sentence


def test_doubts() -> None:
    failed = run(A, None, why="no")
    doubtful = comparison(failed, run(B, 10), run(C, 5, samples=None), metrics=("loss",))
    repeats, lengths = doubtful.verdict.doubts
    assert doubtful.missing == "No run logged loss. Logged: nothing, so the script calls no acc.log."
    assert doubtful.verdict.sentence.endswith("bf16 took 2.00 × as long (1 run each).")
    assert repeats == "To be sure, compare 3 runs or more of each plan (--repeats)."
    assert "updates a second are compared (bf16: 100 updates, O1: 100 updates)" in lengths
