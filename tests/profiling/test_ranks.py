"""Profiles on several ranks: a common table where all take part, none waits where they do not, every strategy."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from easymp import Accelerator, ProfileKwargs

from ..strategies.models import make, mean_square, train_step
from ..strategies.ways import WAYS


def train(acc: Accelerator, steps: int, folder: str, alone: bool = False, sleepy: int | None = None) -> Any:
    model = make("mlp")
    model, optimizer, loader = acc.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(TensorDataset(torch.randn(512, 12)), 4)
    )
    prof = acc.profile(ProfileKwargs(profile_memory=True, output_trace_dir=folder))
    if not alone or acc.is_main_process:
        prof.start()
    for i, (x,) in enumerate(loader, 1):
        train_step(acc, model, mean_square, x)
        optimizer.step()
        optimizer.zero_grad()
        if sleepy == acc.process_index:
            time.sleep(0.15)  # more than a busy machine takes from the other rank
        if i == steps:
            break
    prof.stop()
    return prof


def common(folder: str) -> list[Any]:
    with Accelerator(cpu=True, mixed_precision="no") as acc:
        prof = train(acc, 5, folder, sleepy=1)
        alone = train(acc, 5, folder, alone=True)
        found = [prof.summary(), prof.traces[0].name, len(prof.ranks), alone.summary(), len(alone.ranks)]
    acc = Accelerator(cpu=True, mixed_precision="no")
    with acc.profile(ProfileKwargs(output_trace_dir=folder)) as prof:
        model = acc.prepare(make("mlp"))
        for _ in range(3):
            acc.backward(model(torch.randn(4, 12)).sum())
            prof.step()
        acc.end_training()  # inside of the block
    return [*found, prof.summary()]


def test_all_ranks_or_one(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(common, str(tmp_path))
    text, trace, together, alone, one, ended = first
    other, other_trace, own, nothing, none, other_ended = second
    assert (together, own) == (2, 1)  # the first of them tells
    assert (trace, other_trace) == ("rank0-001.json", "rank1-001.json")
    assert "rank  ms a step  own work  communication  data wait" in text
    assert "Rank 1 is the slowest" in text
    assert "communication" in other
    assert text.startswith("profile of rank 0 of 2, 4 steps of ")
    assert (one, none) == (1, 0)
    assert alone.startswith("profile of rank 0 of 2, 4 steps")
    assert nothing.startswith("profile: nothing was recorded")
    assert ended.startswith("profile of rank 0 of 2, 3 steps")
    assert other_ended.startswith("profile of rank 1 of 2, 3 steps")
    names = {e["name"] for e in json.loads((tmp_path / "rank1-001.json").read_text())["traceEvents"]}
    assert {"gloo:all_reduce", "easymp: backward"} <= names


def in_a_way(strategy: str, options: dict[str, Any], folder: str) -> Any:
    how = {"strategy": strategy, "strategy_options": options or None, "gradient_accumulation_steps": 1}
    with Accelerator(cpu=True, mixed_precision="no", **how) as acc:
        prof = train(acc, 4, folder)
        return prof.breakdown.time, len(prof.ranks), prof.summary()


RUNS = {name: (way.strategy, dict(way.options), way.sizes[0]) for name, way in WAYS.items()}
for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"):
    RUNS[f"pipeline {schedule}"] = "pipeline", {"schedule": schedule, "microbatches": 4}, 2
FAST = ("single", "fsdp", "pipeline")


@pytest.mark.parametrize("way", [w if w in FAST else pytest.param(w, marks=pytest.mark.slow) for w in RUNS])
def test_every_strategy(ranks: Any, tmp_path: Path, way: str) -> None:
    strategy, options, processes = RUNS[way]
    results = ranks(in_a_way, strategy, options, str(tmp_path), processes=processes)
    assert results[0][1] == processes
    for time_, _, text in results:
        assert {"data wait", "forward", "backward", "optimizer"} <= set(time_)
        assert ("communication" in time_) == (processes > 1), text
    assert len(list(tmp_path.glob("rank*.json"))) == processes
