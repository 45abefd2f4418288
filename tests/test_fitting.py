"""Strategy "auto" once models are known: what fits whole stays whole, what does not is sharded, on all ranks alike."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch

from easymp import Accelerator, DistributedDataParallelKwargs

from .accelerator.models import heard
from .conftest import Ranks
from .strategies import models

# The transformer with tied embeddings takes 107.5 KiB a rank whole, in fp32 with AdamW, and 90.5 in two shards; a fifth is spared.
FITS, SHARDED, NEITHER = "140KiB", "120KiB", "10KiB"


LOG = "easymp.training.memory"


def train(memory: list[str], asked: dict[str, Any]) -> dict[str, Any]:
    """A training in which each rank has its own of `memory`."""
    own = memory[int(os.environ.get("RANK", 0))]
    with heard(LOG) as said, Accelerator(memory=own, mixed_precision="fp32", cpu=True, **asked) as acc:
        before = acc.plan.strategy.value
        done = models.train(acc, "tied")
        choice = acc.plan.strategy
    return {**done, "before": before, "after": choice.value, "reason": choice.reason, "said": said}


@functools.cache
def alone() -> dict[str, Any]:
    one = train([FITS], {})
    assert (one["after"], one["said"]) == ("single", [])
    return one


@pytest.mark.parametrize(
    ("memory", "strategy", "level"),
    [
        ([FITS, FITS], "ddp", None),
        ([SHARDED, SHARDED], "fsdp", "INFO"),
        ([FITS, SHARDED], "fsdp", "INFO"),  # the poorest rank decides
        ([NEITHER, NEITHER], "fsdp", "WARNING"),
    ],
)
def test_what_does_not_fit_whole_is_sharded(
    ranks: Ranks, memory: list[str], strategy: str, level: str | None
) -> None:
    one = alone()
    seen = ranks(train, memory, {})
    for it in seen:
        assert (it["before"], it["after"]) == ("ddp", strategy)
        assert it["kinds"] == (["Parameter"] if strategy == "ddp" else ["DTensor"])
        assert it["reason"] == seen[0]["reason"]
        torch.testing.assert_close(it["losses"], one["losses"], rtol=1e-5, atol=0)
    reason = seen[0]["reason"]
    if level is None:
        assert (reason, seen[0]["said"]) == ("2 processes", [])
        return
    assert seen[0]["said"] == [(level, f"strategy fsdp: {reason}")]
    assert reason.startswith("ddp needs 107.5 KiB a rank (weights 26.9 KiB, gradients 26.9")
    assert "; fsdp needs 90.5 KiB a rank (weights 13.5 KiB" in reason
    assert ("82.5 KiB too much: training may run out of memory" in reason) == (level == "WARNING")


@pytest.mark.parametrize(
    "asked", [{"strategy": "ddp"}, {"kwargs_handlers": [DistributedDataParallelKwargs(bucket_cap_mb=1)]}]
)
def test_what_was_asked_for_stays(ranks: Ranks, asked: dict[str, Any]) -> None:
    it = ranks(train, [SHARDED, SHARDED], asked)[0]
    assert it["after"] == "ddp"
    assert it["kinds"] == ["Parameter"]
    if "strategy" in asked:
        assert it["said"] == []
    else:
        ((level, words),) = it["said"]
        assert level == "WARNING"
        assert words.endswith("options of ddp were given, so it stays")


def test_one_process_that_has_too_little_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    it = train([NEITHER], {})
    assert it["after"] == "single"
    assert it["said"][0][0] == "WARNING"
    assert it["reason"].startswith("single needs 107.5 KiB a rank (weights 26.9 KiB")


def two_models(memory: str) -> dict[str, Any]:
    """A small model, then a larger one; then again, in the other order, after letting go."""
    with heard(LOG) as said, Accelerator(memory=memory, mixed_precision="fp32", cpu=True) as acc:
        small = acc.prepare(torch.nn.Linear(8, 8))
        larger = acc.prepare(models.make("tied"))
        first = acc.plan.strategy.value, [type(next(m.parameters())).__name__ for m in (small, larger)]
        said = list(said)
        acc.free_memory()
        larger = acc.prepare(models.make("tied"))
        second = acc.plan.strategy.value, type(next(larger.parameters())).__name__
        acc.free_memory()
        small = acc.prepare(torch.nn.Linear(8, 8))
        third = acc.plan.strategy.value, acc.plan.strategy.reason, type(small.weight).__name__
    return {"first": first, "said": said, "second": second, "third": third}


def test_models_that_come_later_change_nothing(ranks: Ranks) -> None:
    seen = ranks(two_models, SHARDED)
    for it in seen:
        assert it["first"] == ("ddp", ["Parameter", "Parameter"])
        # free_memory lets go of all: the next models are the first again
        assert it["second"] == ("fsdp", "DTensor")
        assert it["third"] == ("ddp", "2 processes", "Parameter")
    ((level, words),) = seen[0]["said"]
    assert level == "WARNING"
    assert words.startswith(
        "strategy ddp stays, for models are wrapped already; with this one ddp needs 108.6 KiB a rank"
    )
