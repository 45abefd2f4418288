"""pipeline on real processes: the numbers of one process, wherever the model is cut, and what is in the way of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from easymp import Accelerator

from .models import make, train


def trained(
    strategy: str, kind: str, steps: int, clip: float | None, precision: str = "no", options: Any = None, adam: bool = True
) -> dict[str, Any]:
    with Accelerator(
        mixed_precision=precision, strategy=strategy, strategy_options=options, gradient_accumulation_steps=steps
    ) as acc:
        return train(acc, kind, clip, adam)


def agree(ours: list[dict[str, Any]], one: dict[str, Any], rel: float = 1e-5) -> None:
    """Losses and norms on every rank, and parameters on those that hold them."""
    seen = set()
    for got in ours:
        assert got["losses"] == pytest.approx(one["losses"], rel=rel)
        assert got["norms"] == pytest.approx(one["norms"], rel=rel)
        assert got["lr"] == one["lr"]
        assert list(got["parameters"]) == list(one["parameters"])
        for name, values in got["parameters"].items():
            if not values.is_meta:
                seen.add(name)
                # A key's bias has no gradient but rounding, which Adam makes a step of.
                assert name.endswith("in_proj_bias") or torch.allclose(values, one["parameters"][name], rtol=1e-3, atol=1e-4), name
    assert seen == set(one["parameters"])


TABLE = [(kind, steps, clip, 2) for kind in ("mlp", "tied", "idle") for steps in (1, 3) for clip in (None, 0.1)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("kind", "steps", "clip", "size"), [*TABLE, ("tied", 3, 0.1, 4), ("mlp", 1, None, 4), ("idle", 1, 0.1, 4)])
def test_it_trains_as_one_process(ranks, schedule: str, kind: str, steps: int, clip: float | None, size: int) -> None:
    ours = ranks(trained, "pipeline", kind, steps, clip, "no", {"schedule": schedule}, processes=size)
    agree(ours, trained("single", kind, steps, clip))
