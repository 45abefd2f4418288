"""The verdict: what is said of which times and metrics, and what is not."""

from __future__ import annotations

import math

import pytest

from easymp.comparing.comparison import Comparison
from easymp.comparing.summaries import Run
from easymp.comparing.variants import Variant

from .made import comparison, run

A, B, C = Variant("fp32"), Variant("bf16"), Variant("O1")


def runs(variant: Variant, seconds: list[float], *accuracies: float, **more: object) -> list[Run]:
    """A run for each of `seconds`, with the last of `accuracies` for those that have none of their own."""
    return [
        run(
            variant,
            each,
            i,
            values={"accuracy": [accuracies[min(i, len(accuracies)) - 1]]} if accuracies else {},
            **more,
        )  # type: ignore[arg-type]
        for i, each in enumerate(seconds, 1)
    ]


def said(*groups: list[Run]) -> Comparison:
    return comparison(*(one for group in groups for one in group))


@pytest.mark.parametrize(
    ("one", "two", "sentence"),
    [
        (  # three runs of each that do not overlap are evidence
            runs(A, [10, 10.2, 9.9], 0.989),
            runs(B, [6.2, 6.1, 6.3], 0.987),
            (
                "bf16 takes 0.62 of fp32's time (median of 3: 6.2 s [6.1 s to 6.3 s] against 10.0 s [9.9 s to 10.2 s]) and reaches "
                "accuracy 98.70% where fp32 reaches 98.90%: take bf16."
            ),
        ),
        (  # one run of each is a hint
            runs(A, [10], 0.989),
            runs(B, [6.2], 0.987),
            (
                "bf16 takes 0.62 of fp32's time (one run each: 6.2 s against 10.0 s) and reaches accuracy 98.70% where fp32 reaches "
                "98.90%: a hint to take bf16, no more. Compare again with --repeats 3 or more to know."
            ),
        ),
        (  # … of a tenth or more
            runs(A, [10], 0.989),
            runs(B, [9.5], 0.989),
            (
                "No difference is shown: bf16 took 0.95 of fp32's time (one run each: 9.5 s against 10.0 s), less than a tenth apart. "
                "Compare again with --repeats 3 or more to know."
            ),
        ),
        (  # … and on a quiet machine
            runs(A, [10], 0.989, others=30.0),
            runs(B, [5], 0.989),
            (
                "No difference is shown: bf16 took 0.50 of fp32's time (one run each: 5 s against 10.0 s), on a busy machine. "
                "Compare again with --repeats 3 or more to know."
            ),
        ),
        (  # … but for what no other work explains
            runs(A, [10], 0.989, others=30.0),
            runs(B, [95], 0.989),
            "bf16 seems to take 9.50 times as long as fp32 (one run each: 95.0 s against 10.0 s): stay with fp32.",
        ),
        (  # on a busy one many runs are a hint
            runs(A, [10, 10.2, 9.9], others=30.0),
            runs(B, [6.2, 6.1, 6.3]),
            (
                "bf16 takes 0.62 of fp32's time (median of 3: 6.2 s [6.1 s to 6.3 s] against 10.0 s [9.9 s to 10.2 s]): a hint to take "
                "bf16, no more. Compare again with more --repeats, on a quiet machine, to know."
            ),
        ),
        (  # runs that overlap show nothing, however far apart the medians are
            runs(A, [10, 12, 8]),
            runs(B, [7, 9, 6]),
            (
                "No difference is shown: bf16 took 0.70 of fp32's time (median of 3: 7 s [6 s to 9 s] against 10.0 s [8 s to 12.0 s]), "
                "and their runs overlap. Compare again with more --repeats, on a quiet machine, to know."
            ),
        ),
        (  # what is slower is not taken
            runs(A, [10, 10.2, 9.9]),
            runs(B, [13, 13.1, 13.2]),
            (
                "bf16 takes 1.31 times as long as fp32 (median of 3: 13.1 s [13.0 s to 13.2 s] against 10.0 s [9.9 s to 10.2 s]): stay "
                "with fp32."
            ),
        ),
        (  # nor what is worse
            runs(A, [10, 10.2, 9.9], 0.989),
            runs(B, [6.2, 6.1, 6.3], 0.88),
            (
                "bf16 takes 0.62 of fp32's time (median of 3: 6.2 s [6.1 s to 6.3 s] against 10.0 s [9.9 s to 10.2 s]), but reaches "
                "accuracy 88.00% where fp32 reaches 98.90%: stay with fp32."
            ),
        ),
        (  # a metric that differs from seed to seed is not worse by less than that
            runs(A, [10, 10.2, 9.9], 0.95, 0.97, 0.96),
            runs(B, [6.2, 6.1, 6.3], 0.94, 0.945, 0.95),
            (
                "bf16 takes 0.62 of fp32's time (median of 3: 6.2 s [6.1 s to 6.3 s] against 10.0 s [9.9 s to 10.2 s]) and reaches "
                "accuracy 94.50% where fp32 reaches 96.00%, no more apart than runs of one plan are: take bf16."
            ),
        ),
        (  # without a metric the sentence says what it does not know
            runs(A, [10, 10.2, 9.9]),
            runs(B, [6.2, 6.1, 6.3], peak=1 << 29),
            (
                "bf16 takes 0.62 of fp32's time (median of 3: 6.2 s [6.1 s to 6.3 s] against 10.0 s [9.9 s to 10.2 s]), with 0.50 of its "
                "memory (512.0 MiB): take bf16, if its results are as good: no metric was logged to say so."
            ),
        ),
        (  # one that diverged is worse, whatever its time
            runs(A, [10], 0.989),
            runs(B, [5], math.nan),
            (
                "bf16 takes 0.50 of fp32's time (one run each: 5 s against 10.0 s), but reaches accuracy nan where fp32 reaches 98.90%: "
                "stay with fp32."
            ),
        ),
        (  # runs of other lengths are compared by speed
            runs(A, [10], samples=1000),
            runs(B, [10], samples=2000),
            (
                "bf16 takes 0.50 of fp32's time (one run each: 200 samples/s against 100 samples/s): a hint to take bf16, no more. "
                "Compare again with --repeats 3 or more to know."
            ),
        ),
        (runs(A, [10]), [run(B, None, why="no")], "Only fp32 finished: there is nothing to compare it with."),
        (
            [run(A, None, why="no")],
            [run(B, None, why="no")],
            "No plan finished with at least two updates, so there is nothing to compare.",
        ),
    ],
)
def test_sentences(one: list[Run], two: list[Run], sentence: str) -> None:
    assert said(one, two).verdict.sentence == sentence


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
    found = comparison(
        run(A, None, why="no", others=2.0),
        run(B, 10, others=12.0),
        run(C, 5, others=6.4, samples=None),
        metrics=("loss",),
    )
    assert found.missing == ("loss",)
    assert found.verdict.doubts == (
        "fp32 did not finish: others are compared with bf16.",
        (
            "The machine was busy: other work used 12.0 of its 64 processors during bf16 (run 1), and more than a tenth of them in 1 of 3 "
            "runs. Times are the worse for it."
        ),
        (
            "The runs did not train on the same number of samples, so times are compared by speed (bf16: 100 updates, 1,000 samples, O1: "
            "100 updates)."
        ),
    )
