"""examples/approaches: eight ways to train one model, all to the same accuracy."""

from __future__ import annotations

import os
import sys
from unittest import mock

import pytest

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


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_epoch_learns(ranks: Ranks, name: str) -> None:
    processes = 1 if name == "dataparallel" else 2
    run, words = (STARTED[name], ()) if name in STARTED else (trained, (name,))
    printed, *silent = ranks(run, *words, "--epochs", "1", processes=processes, env={"EASYMP_PROBE": "0"})
    assert number("test accuracy", printed) > 60
    assert not any(silent)
