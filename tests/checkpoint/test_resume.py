"""A run that is killed at any moment and started again ends as the one that was not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from easymp import checkpoint

from ..conftest import Ranks
from .runs import Case, train

PERSISTENT = {"workers": 2}
POWER = {"comm_hook": "power_sgd", "comm_state_option": {"start_powerSGD_iter": 2}}
# case, processes before, processes after, killed after updates, killed at the n-th beginning or end of a write of a rank
Row = tuple[Case, int, int, int, int]
ROWS: dict[str, Row] = {
    "one process, in a save": (Case(accumulation=2), 1, 1, 0, 30),
    "ddp, asynchronously, between saves": (Case("ddp", accumulation=2, async_=True), 2, 2, 5, 0),
    "ddp, at an epoch's end": (Case("ddp"), 2, 2, 5, 0),
    "ddp, in fp16": (Case("ddp", precision="fp16"), 2, 2, 7, 0),
    "fsdp, in a save": (Case("fsdp"), 2, 2, 0, 19),
    "zero1, in bf16": (Case("zero1", precision="bf16", accumulation=2), 2, 2, 4, 0),
    "local_sgd": (Case("local_sgd", {"every": 3}), 2, 2, 7, 0),
    "statistics of batches": (Case("ddp", norm=True), 2, 2, 5, 0),
    "a stream with a state": (Case("ddp", data="remembered"), 2, 2, 8, 0),
    "two processes, then one": (Case(), 2, 1, 8, 0),
    "one process, then two": (Case(accumulation=2), 1, 2, 4, 0),
}
SLOW: dict[str, Row] = {
    "ddp in bf16, four processes, in a save": (Case("ddp", precision="bf16"), 4, 4, 0, 23),
    "zero1, four processes": (Case("zero1", accumulation=2), 4, 4, 5, 0),
    "fsdp in bf16, four processes, in a save": (Case("fsdp", precision="bf16"), 4, 4, 0, 23),
    "hsdp": (Case("hsdp", {"shard_size": 2}, accumulation=2), 4, 4, 5, 0),
    "tensor_parallel in bf16, in a save": (Case("tensor_parallel", precision="bf16"), 2, 2, 0, 23),
    "tensor_parallel in fsdp": (Case("tensor_parallel", {"size": 2}, accumulation=2), 4, 4, 5, 0),
    "pipeline in bf16, in a save": (Case("pipeline", precision="bf16"), 2, 2, 0, 23),
    "persistent workers": (Case(**PERSISTENT), 1, 1, 8, 0),
    "ddp, with PowerSGD": (Case("ddp", POWER), 2, 2, 6, 0),
    "one process, asynchronously, in a save": (Case(accumulation=2, async_=True), 1, 1, 0, 30),
    "fsdp in bf16, asynchronously, in a save": (Case("fsdp", precision="bf16", async_=True), 2, 2, 0, 31),
    "two processes, asynchronously, then one": (Case(accumulation=2, async_=True), 2, 1, 5, 0),
    "fsdp, four processes, then two": (Case("fsdp"), 4, 2, 8, 0),
    "ddp, one process, then four": (Case("auto"), 1, 4, 8, 0),
    "a stream": (Case("ddp", data="stream"), 2, 2, 8, 0),
    "a stream, two processes, then one": (Case(data="stream"), 2, 1, 8, 0),
    "a stream, in workers": (Case(data="remembered", **PERSISTENT), 1, 1, 8, 0),
    "dispatched": (Case("ddp", loading={"dispatch_batches": True}), 2, 2, 8, 0),
    **{
        f"statistics of batches, {strategy}": (Case(strategy, norm=True), 2, 2, 7, 0)
        for strategy in ("zero1", "fsdp", "local_sgd")
    },
    "the sampler's own random state": (Case("ddp", loading={"use_seedable_sampler": False}), 2, 2, 7, 0),
}


def whole_life(ranks: Ranks, folder: str, row: Row) -> tuple[list[Any], list[Any]]:
    """Each rank's result of a run without interruption, and of one that was killed and started again."""
    case, before, after, step, write = row
    if case.strategy == "pipeline":
        case = replace(case, options={"microbatches": 2})
    straight = ranks(train, f"{folder}/straight", case, processes=after)
    died = ranks.fails(train, f"{folder}/killed", case, step, write, processes=before)
    assert any(getattr(outcome, "type", "") == "SIGKILL" for outcome in died)
    return straight, ranks(train, f"{folder}/killed", case, processes=after)


def same_end(ranks: Ranks, folder: str, row: Row) -> None:
    straight, again = whole_life(ranks, folder, row)
    went_on(straight, again, exactly=row[1] == row[2])
    assert all(entry.committed for entry in checkpoint.list_checkpoints(f"{folder}/straight/checkpoints"))


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def went_on(straight: list[Any], again: list[Any], exactly: bool) -> None:
    for one, other in zip(straight, again):
        assert other["resumed"] is not None
        assert 0 < len(other["seen"]) < len(one["seen"])
        assert other["seen"] == one["seen"][-len(other["seen"]) :]
        assert other["tested"] == one["tested"][-len(other["tested"]) :]
        assert (other["updates"], other["lr"]) == (one["updates"], one["lr"])
        if exactly:
            assert same(other["weights"], one["weights"])
            assert all(map(torch.equal, other["statistics"], one["statistics"]))
            assert other["drawn"][1] == one["drawn"][1] and torch.equal(other["drawn"][0], one["drawn"][0])


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_killed_and_started_again(ranks: Ranks, tmp_path: Path, row: Row) -> None:
    same_end(ranks, str(tmp_path), row)


@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW.values(), ids=SLOW)
def test_killed_and_started_again_in_all_ways(ranks: Ranks, tmp_path: Path, row: Row) -> None:
    same_end(ranks, str(tmp_path), row)


@pytest.mark.slow
def test_killed_and_started_again_in_an_object_store(ranks: Ranks, tmp_path: Path, s3: str) -> None:
    case = Case("ddp", store=fsspec.config.conf["s3"], async_=True)
    same_end(ranks, f"{s3}/{tmp_path.name}", (case, 2, 2, 0, 29))


@pytest.mark.slow
def test_killed_and_started_again_by_torchrun(ranks: Ranks, tmp_path: Path) -> None:
    straight, folder = ranks(train, str(tmp_path / "straight"), Case("ddp"), processes=2), tmp_path / "killed"
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    command = [sys.executable, "-m", *launch, "-m", "tests.checkpoint.runs", str(folder)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert "exitcode: -9" in done.stderr
    went_on(straight, [torch.load(folder / f"{rank}.pt") for rank in (0, 1)], exactly=True)


@pytest.mark.parametrize("write", [1, 2, 6])
def test_killed_in_the_first_save_it_begins_anew(ranks: Ranks, tmp_path: Path, write: int) -> None:
    straight, again = whole_life(ranks, str(tmp_path), (Case(), 1, 1, 0, write))
    assert again[0]["resumed"] is None
    assert again[0]["seen"] == straight[0]["seen"]
    assert same(again[0]["weights"], straight[0]["weights"])
