"""examples/shapes.py and examples/finetune.py learn, on two processes."""

from __future__ import annotations

import re

import pytest

from ..conftest import Ranks
from .run import within


def test_the_residual_network_learns_the_shapes(ranks: Ranks) -> None:
    printed, silent = ranks(within, "examples/shapes.py")
    assert "epoch 2: test accuracy" in printed and silent == ""
    assert float(re.findall(r"test accuracy ([0-9.]+)%", printed)[-1]) > 90


def test_the_language_model_learns(ranks: Ranks) -> None:
    pytest.importorskip(
        "transformers", reason="an optional package is not installed: transformers (of the group pages)"
    )
    printed, _ = ranks(within, "examples/finetune.py")
    losses = [float(loss) for loss in re.findall(r"update \d+: loss ([0-9.]+)", printed)]
    assert losses[-1] < losses[0] < 4
