"""The arithmetic of `easymp compare`: metrics, verdicts and doubts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from easymp.cli.compare.runs import Variant
from easymp.cli.compare.summary import Run, choose, metric
from easymp.cli.compare.verdict import Comparison
from easymp.cli.curves import running_mean

from .runs import comparison, run

A, B, C = Variant("fp32"), Variant("bf16"), Variant("O1")


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["loss", "lr", "accuracy"], ["loss", "accuracy", "lr"]),
        (["lr", "a", "b", "c", "train_loss", "eval_loss", "eval_accuracy"], ["train_loss", "eval_accuracy"]),
        (["eval/loss", "a", "b", "c", "d"], ["eval/loss"]),
        (["val/loss", "ce_loss", "a", "b", "c", "val_acc", "train_acc"], ["ce_loss", "val_acc"]),
        (["a", "b"], ["a", "b"]),
        (["a", "b", "c", "d", "e"], []),
    ],
)
def test_loss_and_accuracy_or_all_of_a_few_are_compared(names: list[str], chosen: list[str]) -> None:
    assert [each.name for each in choose(names)] == chosen
    assert [each.name for each in choose(names, ["f1", "nothing"])] == ["f1", "nothing"]


def test_only_known_names_have_a_direction() -> None:
    better = {"loss": -1, "top5": 1, "valAcc": 1, "eval/F1": 1, "perplexity": -1, "lr": 0, "lossless": 0}
    assert {name: metric(name).better for name in better} == better


def test_a_noisy_curve_ends_with_a_mean_and_is_drawn_as_one() -> None:
    assert metric("loss").final([5.0] * 20 + [1.0]) == 1.0
    assert metric("loss").final([5.0] * 98 + [1.0, 2.0, 3.0, 2.0, 2.0]) == pytest.approx(2.0)
    points = [(float(i), float(i % 2)) for i in range(100)]
    mean = running_mean(points)
    assert [x for x, _ in mean] == [x for x, _ in points] and mean[0] == points[0]
    assert mean[50][1] == pytest.approx(sum(i % 2 for i in range(48, 53)) / 5)


def runs(variant: Variant, seconds: list[float], *accuracies: float, **more: Any) -> list[Run]:
    """A run for each of `seconds`; the last of `accuracies` is that of those without their own."""
    found = []
    for number, each in enumerate(seconds, 1):
        values = {"accuracy": [accuracies[min(number, len(accuracies)) - 1]]} if accuracies else {}
        found.append(run(variant, each, number, values=values, **more))
    return found


def said(*groups: list[Run]) -> Comparison:
    return comparison(*(one for group in groups for one in group))


SLOW, FAST = [10, 10.2, 9.9], [6.2, 6.1, 6.3]
TIMES = "(median of 3: 6.2 s [6.1 s to 6.3 s] against 10.0 s [9.9 s to 10.2 s])"
TAKES = f"bf16 takes 0.62 of fp32's time {TIMES}"
ONE = "(one run each: 5 s against 10.0 s)"


@pytest.mark.parametrize(
    ("one", "two", "words"),
    [
        # three runs that do not overlap are evidence, fewer a hint, less than a tenth nothing
        (runs(A, SLOW, 0.989), runs(B, FAST, 0.987), f"{TAKES} and reaches accuracy 98.70%"),
        (runs(A, [10], 0.989), runs(B, [5], 0.987), "98.90%: a hint to take bf16, no more. Compare again"),
        (runs(A, [10]), runs(B, [9.5]), "No difference is shown: bf16 took 0.95 of fp32's time"),
        (runs(A, [10, 12, 8]), runs(B, [7, 9, 6]), "and their runs overlap. Compare again with more"),
        # on a busy machine many runs are a hint, and few show only a factor that other work does not explain
        (runs(A, [10], others=30.0), runs(B, [5]), f"0.50 of fp32's time {ONE}, on a busy machine."),
        (runs(A, [10], others=30.0), runs(B, [95]), "bf16 seems to take 9.50 times as long as fp32"),
        (runs(A, SLOW, others=30.0), runs(B, FAST), "a hint to take bf16, no more."),
        (runs(A, SLOW), runs(B, [13, 13.1, 13.2]), "bf16 takes 1.31 times as long as fp32"),
        # a metric that is worse by more than runs of one plan lie apart, or NaN
        (runs(A, SLOW, 0.989), runs(B, FAST, 0.88), "88.00% where fp32 reaches 98.90%: stay with fp32."),
        (runs(A, SLOW, 0.95, 0.97, 0.96), runs(B, FAST, 0.94, 0.945, 0.95), "of one plan are: take bf16."),
        (runs(A, [10], 0.989), runs(B, [5], math.nan), "accuracy nan where fp32 reaches 98.90%: stay"),
        (runs(A, SLOW), runs(B, FAST, peak=1 << 29), "with 0.50 of its memory (512.0 MiB): take bf16,"),
        # runs of other lengths are compared by speed
        (runs(A, [10]), runs(B, [10], samples=2000), "0.50 of fp32's time"),
        (runs(A, [10]), [run(B, None, why="no")], "Only fp32 finished"),
        ([run(A, None)], [run(B, None)], "No plan finished with at least two updates"),
    ],
)
def test_the_sentence_is_as_strong_as_its_evidence(one: list[Run], two: list[Run], words: str) -> None:
    assert words in said(one, two).verdict.sentence


def test_the_best_of_several_is_named_and_the_others_have_a_line() -> None:
    verdict = said(runs(A, [10], 0.9), runs(B, [7], 0.9), runs(C, [5], 0.5)).verdict
    assert verdict.sentence.startswith("bf16 takes 0.70 of fp32's time")
    assert verdict.evidence == ("O1: seems to take 0.50 of fp32's time (5 s); reaches accuracy 50.00%.",)


def test_a_loss_decides_where_there_is_no_accuracy() -> None:
    better = run(B, 5, values={"loss": [3.0, 1.02], "lr": [1.0]})
    worse = run(C, 4, values={"loss": [3.0, 1.2], "lr": [1.0]})
    found = comparison(run(A, 10, values={"loss": [3.0, 1.0], "lr": [1.0]}), better, worse)
    assert found.verdict.sentence.startswith("bf16 takes 0.50 of fp32's time")
    assert "reaches loss 1.02 where fp32 reaches 1:" in found.verdict.sentence


def test_doubts() -> None:
    two, three = run(B, 10, others=12.0), run(C, 5, others=6.4, samples=None)
    found = comparison(run(A, None, why="no", others=2.0), two, three, metrics=("loss",))
    first, busy, counts = found.verdict.doubts
    assert found.missing == ("loss",)
    assert first == "fp32 did not finish: others are compared with bf16."
    assert "12.0 of its 64 processors during bf16 (run 1)" in busy and "1 of 3 runs" in busy
    assert "by speed (bf16: 100 updates, 1,000 samples, O1: 100 updates)" in counts
