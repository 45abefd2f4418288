"""Strategy "auto" once models are known: what fits whole stays whole, what does not is sharded, on all ranks alike."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch

from easymp import Accelerator, DistributedDataParallelKwargs, Settings
from easymp.training.memory import estimate

from .accelerator.models import heard
from .strategies import models

# The transformer with tied embeddings takes 107.5 KiB a rank whole, in fp32 with AdamW, and 90.5 in two shards; a fifth
# is spared.
FITS, SHARDED, NEITHER = "140KiB", "120KiB", "10KiB"
LOG = "easymp.training.memory"


def train(memory: list[str], asked: dict[str, Any]) -> dict[str, Any]:
    """A training in which each rank has its own of `memory`."""
    own = memory[int(os.environ.get("RANK", 0))]
    settings = Settings(memory=own)
    with heard(LOG) as said, Accelerator(mixed_precision="fp32", cpu=True, settings=settings, **asked) as acc:
        before = acc.plan.strategy.value
        done = models.train(acc, "tied")
        plan = acc.plan
    told = {"shown": plan.explain(), "candidates": plan.as_dict().get("candidates", []), "said": said}
    return {**done, **told, "before": before, "after": plan.strategy.value, "reason": plan.strategy.reason}


@functools.cache
def alone() -> dict[str, Any]:
    one = train([FITS], {})
    assert (one["after"], one["said"]) == ("single", [])
    return one


@pytest.mark.parametrize(
    ("memory", "strategy", "level"),
    [
        ([FITS, FITS], "ddp", None),
        ([FITS, SHARDED], "fsdp", "INFO"),  # the poorest rank decides
        ([NEITHER, NEITHER], "fsdp", "WARNING"),
    ],
)
def test_what_does_not_fit_whole_is_sharded(ranks, memory, strategy, level):
    one = alone()
    seen = ranks(train, memory, {})
    for it in seen:
        assert (it["before"], it["after"], it["reason"]) == ("ddp", strategy, seen[0]["reason"])
        assert it["kinds"] == (["Parameter"] if strategy == "ddp" else ["DTensor"])
        torch.testing.assert_close(it["losses"], one["losses"], rtol=1e-5, atol=0)
    reason = seen[0]["reason"]
    if level is None:
        assert (reason, seen[0]["said"]) == ("2 processes; the fewest moving parts, and it fits", [])
        return
    assert seen[0]["said"] == [(level, f"strategy fsdp: {reason}")]
    assert reason.startswith("ddp needs 107.5 KiB a rank (weights 26.9 KiB, gradients 26.9")
    assert "; fsdp needs 90.5 KiB a rank (weights 13.5 KiB" in reason
    assert ("82.5 KiB too much: training may run out of memory" in reason) == (level == "WARNING")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"strategy": "ddp"}, ""),
        ({"strategy_options": DistributedDataParallelKwargs(bucket_cap_mb=1)},
         "options of ddp were given, so it stays"),
    ],
)  # fmt: skip
def test_what_was_asked_for_stays(ranks, asked, words):
    it = ranks(train, [SHARDED, SHARDED], asked)[0]
    assert (it["after"], it["kinds"]) == ("ddp", ["Parameter"])
    assert [(level, said.endswith(words)) for level, said in it["said"]] == ([("WARNING", True)] if words else [])


def test_the_plan_holds_what_auto_chose_from(ranks):
    each = ranks(train, [SHARDED, SHARDED], {})
    assert [it["candidates"] for it in each] == [each[0]["candidates"]] * 2
    ddp, fsdp = each[0]["candidates"]
    assert (ddp["strategy"], ddp["fits"], fsdp["strategy"], fsdp["fits"]) == ("ddp", False, "fsdp", True)
    assert fsdp["reason"] == "90.5 KiB a rank without activations, fits"
    assert all(one["reason"] in each[0]["shown"] for one in (ddp, fsdp)) and "candidates    ddp" in each[0]["shown"]
    assert ddp["bytes"] == estimate(models.make("tied"), world=2).total


def two_models(memory: str) -> dict[str, Any]:
    """A small model, then a larger one; then again, in the other order, after letting go."""

    def seen(acc: Accelerator, *prepared: torch.nn.Module) -> tuple[str, list[str]]:
        return acc.plan.strategy.value, [type(next(m.parameters())).__name__ for m in prepared]

    with heard(LOG) as said, Accelerator(mixed_precision="fp32", cpu=True, settings=Settings(memory=memory)) as acc:
        first = seen(acc, acc.prepare(torch.nn.Linear(8, 8)), acc.prepare(models.make("tied")))
        said = list(said)
        acc.free_memory()
        second = seen(acc, acc.prepare(models.make("tied")))
        acc.free_memory()
        third = seen(acc, acc.prepare(torch.nn.Linear(8, 8)))
        return {"strategies": [first, second, third], "reason": acc.plan.strategy.reason, "said": said}


def test_models_that_come_later_change_nothing(ranks):
    each = ranks(two_models, SHARDED)
    for it in each:
        # free_memory lets go of all: the next models are the first again
        two = ["Parameter", "Parameter"]
        assert it["strategies"] == [("ddp", two), ("fsdp", ["DTensor"]), ("ddp", ["Parameter"])]
        assert it["reason"] == "2 processes; the fewest moving parts, and it fits"
    ((level, words),) = each[0]["said"]
    start = "strategy ddp stays, for models are wrapped already; with this one ddp needs 108.6 KiB a rank"
    assert level == "WARNING" and words.startswith(start)
