"""The record of a run: real trainings, read back as `easymp compare` reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from easymp.cli.compare.runs import Record, read

from ..conftest import Ranks
from ..words import make_accelerator


def train(
    accumulation: int = 1, batches: int = 6, updates: int = 1, epochs: int = 1, counted: bool = False, **settings: Any
) -> None:
    """A linear model on `batches` batches of 4, with `updates` of each."""
    settings = {"cpu": True, "log_with": "none", **settings}
    acc = make_accelerator(gradient_accumulation_steps=accumulation, **settings)
    data = torch.utils.data.TensorDataset(torch.arange(4.0 * batches * acc.num_processes).unsqueeze(1))
    model, loader = torch.nn.Linear(1, 1), torch.utils.data.DataLoader(data, batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    model, optimizer, loader = acc.prepare(model, optimizer, loader)
    for _ in acc.epochs(epochs) if counted else range(epochs):
        for (x,) in loader:
            for _ in range(updates):
                with acc.accumulate(model):
                    loss = model(x).square().mean()
                    acc.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
            acc.log({"loss": loss, "deep": {"rate": 0.5}, "word": "no number", "lost": float("nan")})
            if updates > 1:
                break
    acc.end_training()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EASYMP_RECORD", str(tmp_path / "record"))
    return tmp_path / "record"


def found(folder: Path) -> Record:
    record = read(folder)
    assert record is not None
    return record


@pytest.mark.parametrize("counted", [True, False])
def test_the_length_of_the_training_is_told_where_epochs_counts_it(counted: bool, folder: Path) -> None:
    train(2, batches=5, epochs=3, counted=counted)
    lines = [json.loads(line) for line in (folder / "rank-0.jsonl").read_text().splitlines()]
    assert [line["total"] for line in lines if line["event"] == "first"] == [9 if counted else None]
    assert lines[-1]["updates"] == 9


@pytest.mark.parametrize("log_with", ["none", "jsonl"])
def test_a_run_is_recorded_beside_its_own_trackers(log_with: str, tmp_path: Path, folder: Path) -> None:
    train(log_with=log_with, project_dir=str(tmp_path))
    assert (tmp_path / "log.jsonl").exists() == (log_with == "jsonl")
    record = found(folder)
    assert (record.updates, record.samples) == (5, 20)  # after the first update
    assert record.seconds is not None and record.first is not None
    assert set(record.curves) == {"loss", "deep/rate", "lost"}
    assert [point.step for point in record.curves["loss"]] == [1, 2, 3, 4, 5, 6]
    seconds = [point.seconds for point in record.curves["loss"]]
    assert seconds == sorted(seconds)
    assert all(point.value != point.value for point in record.curves["lost"])
    assert not record.device_memory
    assert record.peak >= max(count for _, count in record.memory) > 1 << 20
    assert record.plan["strategy"]["value"] == "single"
    assert record.machine["torch"] == torch.__version__


def test_accumulation_counts_windows_and_all_their_samples(folder: Path) -> None:
    train(accumulation=2)
    record = found(folder)
    assert (record.updates, record.samples) == (2, 16)
    assert [point.step for point in record.curves["loss"]] == [0, 1, 1, 2, 2, 3]


def test_each_rank_has_a_file_and_the_main_one_the_values(tmp_path: Path, ranks: Ranks) -> None:
    ranks(train, env={"EASYMP_RECORD": str(tmp_path)})
    texts = [(tmp_path / f"rank-{rank}.jsonl").read_text().splitlines() for rank in (0, 1)]
    kinds = [{json.loads(line)["event"] for line in lines} for lines in texts]
    assert kinds == [{"begin", "memory", "first", "log", "end"}, {"begin", "memory", "first", "end"}]
    record = found(tmp_path)
    assert (record.updates, record.samples, record.plan["processes"]) == (5, 40, 2)


def test_several_updates_of_one_batch_have_no_number_of_samples(folder: Path) -> None:
    train(updates=3)
    assert (found(folder).updates, found(folder).samples) == (2, None)


def test_a_killed_run_is_read_as_far_as_it_came(folder: Path) -> None:
    train()
    path = folder / "rank-0.jsonl"
    kept = [line for line in path.read_text().splitlines() if '"end"' not in line]
    path.write_text("\n".join([*kept, kept[-1][: len(kept[-1]) // 2]]))
    record = found(folder)
    assert (record.updates, record.samples) == (5, 20)
    assert record.seconds is not None
    assert record.plan["precision"]["value"]


@pytest.mark.gpu
def test_on_an_accelerator_its_own_memory_and_its_own_clock_count(folder: Path) -> None:
    train(cpu=False)
    record = found(folder)
    assert record.device_memory and record.peak >= max(count for _, count in record.memory) > 0
    assert record.seconds is not None and record.seconds > 0
