"""examples/approaches: eight ways to train one model, all to the same accuracy."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from examples.approaches import table
from examples.approaches.task import Prefetcher

from ..conftest import Ranks
from .run import ROOT, number, within

FOLDER = ROOT / "examples/approaches"
PROGRAMS = sorted(path.stem.removeprefix("with_") for path in FOLDER.glob("with_*.py"))
SLURM = {"SLURM_PROCID": "RANK", "SLURM_LOCALID": "LOCAL_RANK", "SLURM_NTASKS": "WORLD_SIZE"}


def trained(name: str, *arguments: str) -> str:
    """What the program prints on this rank."""
    sys.path.insert(0, str(FOLDER))
    try:
        return within(f"examples/approaches/with_{name}.py", *arguments)
    finally:
        sys.path.remove(str(FOLDER))


def under_slurm(*arguments: str) -> str:
    """As srun starts it, by a batch script that says where to meet."""
    os.environ.update({slurm: os.environ.pop(ours) for slurm, ours in SLURM.items()}, SLURM_JOB_ID="4711")
    return trained("slurm", *arguments)


def spawned(*arguments: str) -> str:
    """As a process that torch.multiprocessing.spawn started, without the seconds that a new interpreter takes."""
    rank, size, place = int(os.environ["RANK"]), os.environ["WORLD_SIZE"], "tcp://{MASTER_ADDR}:{MASTER_PORT}"
    with mock.patch("torch.multiprocessing.spawn", lambda worker, nprocs, args: worker(rank, *args)):
        return trained("spawn", *arguments, "--processes", size, "--dist-url", place.format_map(os.environ))


STARTED = {"slurm": under_slurm, "spawn": spawned}


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "apex"])  # fp16 is slow on most CPUs
def test_an_epoch_learns(ranks: Ranks, name: str) -> None:
    processes = 1 if name == "dataparallel" else 2
    run, words = (STARTED[name], ()) if name in STARTED else (trained, (name,))
    printed, *silent = ranks(run, *words, "--epochs", "1", processes=processes)
    assert number("test accuracy", printed) > 60
    assert not any(silent)


# -- the prefetcher ----------------------------------------------------------------------------------------------------


class Sent:
    """A tensor that says where it is sent."""

    def __init__(self, number: int, said: list[str]) -> None:
        self.number, self.said = number, said

    def to(self, device: object, non_blocking: bool) -> Sent:
        self.said.append(f"copy {self.number}")
        return self

    def record_stream(self, stream: object) -> None:
        self.said.append(f"keep {self.number}")


def test_a_prefetcher_copies_the_next_batch_before_it_hands_one_out() -> None:
    said: list[str] = []
    fake = {"Stream": mock.Mock(), "stream": lambda side: nullcontext(), "current_stream": mock.Mock()}
    with mock.patch.multiple(torch.cuda, **fake):
        sent = [[Sent(i, said)] for i in range(3)]
        for (tensor,) in Prefetcher(sent, SimpleNamespace(type="cuda")):
            said.append(f"compute {tensor.number}")
    assert said == [
        *("copy 0", "copy 1", "keep 0", "compute 0"),
        *("copy 2", "keep 1", "compute 1", "keep 2", "compute 2"),
    ]


@pytest.mark.gpu
def test_batches_arrive_on_the_device_as_they_were() -> None:
    data = [[torch.full((256, 1024), float(i)).pin_memory()] for i in range(20)]
    arrived = [tensor * 1 for (tensor,) in Prefetcher(data, torch.device("cuda", 0))]
    assert all(there.is_cuda and torch.equal(there.cpu(), here) for there, (here,) in zip(arrived, data, strict=True))


# -- the table ---------------------------------------------------------------------------------------------------------


def test_the_table_is_of_these_programs() -> None:
    assert sorted(approach.name for approach in table.APPROACHES) == PROGRAMS
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| [")]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in lines]
    shown = [[f"[{a.title}]({a.program.name})", table.size(a), a.precision] for a in table.APPROACHES]
    assert rows == shown, "python examples/approaches/table.py writes it"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_reach_the_same_accuracy() -> None:
    accuracies = {}
    for approach in table.APPROACHES:
        warm = replace(approach, command=(sys.executable, *approach.command[1:]))
        accuracies[approach.name] = table.run(warm, "--epochs", "10").accuracy
    assert min(accuracies.values()) > 98, accuracies
    assert max(accuracies.values()) - min(accuracies.values()) <= 1, accuracies
