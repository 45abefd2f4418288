"""Profiles on several ranks: a common table where all take part, none waits where they do not, every strategy."""

from __future__ import annotations

import json
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from easymp import Accelerator, ProfileKwargs

from ..strategies.models import make, mean_square, train_step
from ..strategies.ways import WAYS
from ..words import make_accelerator


def train(acc: Accelerator, steps: int, folder: str, main_only: bool = False, sleepy: int | None = None) -> Any:
    model = make("mlp")
    model, optimizer, loader = acc.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(TensorDataset(torch.randn(512, 12)), 4)
    )
    prof = acc.profile(ProfileKwargs(profile_memory=True, output_trace_dir=folder))
    if not main_only or acc.is_main_process:
        prof.start()
    for i, (x,) in enumerate(loader, 1):
        train_step(acc, model, mean_square, x)
        optimizer.step()
        optimizer.zero_grad()
        if sleepy == acc.process_index:
            sleep(0.15)  # more than a busy machine takes from the other rank
        if i == steps:
            break
    prof.stop()
    return prof


def profiles(folder: str) -> list[Any]:
    """Summary and number of ranks of profiles by both ranks, by rank 0 alone, and of a block that ends the run."""
    with Accelerator(cpu=True, mixed_precision="no") as acc:
        profs = [train(acc, 5, folder, sleepy=1), train(acc, 5, folder, main_only=True)]
    acc = Accelerator(cpu=True, mixed_precision="no")
    with acc.profile(ProfileKwargs(output_trace_dir=folder)) as prof:
        model = acc.prepare(make("mlp"))
        for _ in range(3):
            acc.backward(model(torch.randn(4, 12)).sum())
            prof.step()
        acc.end_training()
    return [(prof.summary(), len(prof.ranks)) for prof in (*profs, prof)]


def test_all_ranks_or_one(ranks: Any, tmp_path: Path) -> None:
    (both, single, closed), (other_both, other_single, other_closed) = ranks(profiles, str(tmp_path))
    assert (both[1], other_both[1]) == (2, 1)  # the first rank has all results
    assert both[0].startswith("profile of rank 0 of 2, 4 steps of ")
    assert "Rank 1 is the slowest" in both[0]
    assert "communication" in other_both[0]
    assert (single[1], other_single[1]) == (1, 0)
    assert single[0].startswith("profile of rank 0 of 2, 4 steps")
    assert other_single[0].startswith("profile: nothing was recorded")
    assert closed[0].startswith("profile of rank 0 of 2, 3 steps")
    assert other_closed[0].startswith("profile of rank 1 of 2, 3 steps")
    events = json.loads((tmp_path / "rank1-001.json").read_text())["traceEvents"]
    assert {"gloo:all_reduce", "easymp: backward"} <= {event["name"] for event in events}


def profile_with(strategy: str, options: dict[str, Any], folder: str) -> Any:
    settings = {"strategy": strategy, "strategy_options": options or None, "gradient_accumulation_steps": 1}
    with make_accelerator(cpu=True, mixed_precision="no", **settings) as acc:
        prof = train(acc, 4, folder)
        return prof.breakdown.time, len(prof.ranks), prof.summary()


RUNS = {name: (setting.strategy, dict(setting.options), setting.sizes[0]) for name, setting in WAYS.items()}
for schedule in ("interleaved_1f1b", "zero_bubble"):  # the others are ways
    RUNS[f"pipeline {schedule}"] = "pipeline", {"schedule": schedule, "microbatches": 4}, 2
FAST = ("single", "fsdp", "pipeline")


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in RUNS])
def test_every_strategy(ranks: Any, tmp_path: Path, name: str) -> None:
    strategy, options, processes = RUNS[name]
    results = ranks(profile_with, strategy, options, str(tmp_path), processes=processes)
    assert results[0][1] == processes
    for time, _, summary in results:
        assert {"data wait", "forward", "backward", "optimizer"} <= set(time)
        assert ("communication" in time) == (processes > 1), summary
    assert len(list(tmp_path.glob("rank*.json"))) == processes
