"""Which logged numbers are compared, and which direction is better."""

from __future__ import annotations

import math

import pytest

from easymp.comparing.metrics import choose, metric


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["loss", "lr", "accuracy"], ["loss", "accuracy", "lr"]),
        (["lr", "a", "b", "c", "train_loss", "eval_loss", "eval_accuracy"], ["train_loss", "eval_accuracy"]),
        (["eval/loss", "a", "b", "c", "d"], ["eval/loss"]),
        (["val/loss", "ce_loss", "a", "b", "c", "val_acc", "train_acc"], ["ce_loss", "val_acc"]),
        (["a", "b"], ["a", "b"]),
        (["a", "b", "c", "d", "e"], []),
        ([], []),
    ],
)
def test_chosen(names: list[str], chosen: list[str]) -> None:
    assert [each.name for each in choose(names)] == chosen


def test_what_is_asked_for_is_taken_in_that_order() -> None:
    assert [each.name for each in choose(["loss", "f1"], ["f1", "nothing"])] == ["f1", "nothing"]


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("loss", -1),
        ("eval_loss", -1),
        ("top5", 1),
        ("valAcc", 1),
        ("eval/F1", 1),
        ("perplexity", -1),
        ("lr", 0),
        ("lossless", 0),
    ],
)
def test_only_known_names_have_a_direction(name: str, better: int) -> None:
    assert metric(name).better == better


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("acc", 0.98712, "98.71%"),
        ("acc", 98.7, "98.7"),
        ("loss", 0.00123456, "0.001235"),
        ("loss", math.inf, "inf"),
        ("x", None, "–"),
    ],
)
def test_numbers(name: str, value: float | None, text: str) -> None:
    assert metric(name).text(value) == text


def test_a_curve_of_single_batches_ends_with_a_mean() -> None:
    assert metric("loss").final([5.0] * 20 + [1.0]) == 1.0
    assert metric("loss").final([5.0] * 98 + [1.0, 2.0, 3.0, 2.0, 2.0]) == pytest.approx(2.0)
