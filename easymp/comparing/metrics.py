"""Which of the logged numbers are compared, which direction is better, and how they are written."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FEW = 4  # scalars, up to which all of them are columns
# Words at the end of a name, such as "eval/accuracy", "val_acc" and "top5".
HIGHER = (
    "accuracy",
    "acc",
    "f1",
    "auc",
    "auroc",
    "bleu",
    "rouge",
    "iou",
    "miou",
    "dice",
    "recall",
    "top",
    "psnr",
    "ssim",
    "r2",
)
LOWER = ("loss", "perplexity", "ppl", "error", "err", "wer", "cer", "mse", "rmse", "mae", "nll", "fid")
HELD_OUT = ("eval", "val", "valid", "validation", "test", "dev")
LOSSES = ("loss", "train_loss", "train/loss", "training_loss")
ACCURACIES = (
    "accuracy",
    "acc",
    "eval_accuracy",
    "eval/accuracy",
    "val_accuracy",
    "val/accuracy",
    "test_accuracy",
    "test/accuracy",
)


@dataclass(frozen=True)
class Metric:
    """One logged number. `better` is 1 where more is better, -1 where less is, 0 where nobody knows."""

    name: str
    better: int = 0

    def text(self, value: float | None) -> str:
        """``"98.71%"`` of a share, four significant digits of others, ``"–"`` of None."""
        if value is None:
            return "–"
        if self.share and 0 <= value <= 1:
            return f"{value:.2%}"
        return f"{value:.4g}" if math.isfinite(value) else str(value)

    @property
    def share(self) -> bool:
        """Whether values from 0 to 1 are shares of samples."""
        return _last(self.name) in ("accuracy", "acc", "top", "recall", "error", "wer", "cer", "f1")

    def final(self, values: Sequence[float]) -> float:
        """What a curve has come to: its last value, of more than 40 the mean of the last twentieth, for single batches scatter."""
        count = max(1, len(values) // 20) if len(values) > 40 else 1
        return sum(values[-count:]) / count


def choose(names: Iterable[str], asked: Sequence[str] = ()) -> list[Metric]:
    """Of what was logged, what is compared: what was asked for, or loss and accuracy, or all of a few."""
    names = list(dict.fromkeys(names))
    if asked:
        return [metric(name) for name in asked]
    picked = [name for name in (loss_of(names), accuracy_of(names)) if name]
    rest = [name for name in names if name not in picked]
    return [metric(name) for name in picked + (rest if len(names) <= FEW else [])]


def metric(name: str) -> Metric:
    word = _last(name)
    return Metric(name, 1 if word in HIGHER else -1 if word in LOWER else 0)


def loss_of(names: Sequence[str]) -> str | None:
    """The name of the training loss."""
    losses = [name for name in names if _last(name) == "loss"]
    training = [name for name in losses if not set(_words(name)) & set(HELD_OUT)]
    return next((name for name in LOSSES if name in names), None) or next(iter(training or losses), None)


def accuracy_of(names: Sequence[str]) -> str | None:
    """The name of the accuracy, on data held out where there is such a one."""
    found = [name for name in names if _last(name) in ("accuracy", "acc")]
    held_out = [name for name in found if set(_words(name)) & set(HELD_OUT)]
    return next((name for name in ACCURACIES if name in names), None) or next(iter(held_out or found), None)


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())


def _last(name: str) -> str:
    """Its last word; "top" of "top5", and "f1" of "f1"."""
    word = next(reversed(_words(name)), "")
    return word if word in HIGHER + LOWER else word.rstrip("0123456789")
