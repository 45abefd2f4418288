"""The parts of docs/recipes: right on two ranks, and after a resume."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from easymp import Accelerator

PAGES = Path(__file__).parents[2] / "docs" / "recipes"
ACCURACY = [0.5, 0.6, 0.55, 0.7, 0.65, 0.6, 0.7, 0.9]  # of each epoch: the best of three more do not follow 0.7


def recipes() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "recipes"}
    for page, title in (("early-stopping.md", "early_stopping.py"), ("best-checkpoints.md", "best_checkpoints.py")):
        code = re.search(rf'```python title="{title}"\n(.*?)```', (PAGES / page).read_text(), re.DOTALL)
        assert code is not None
        exec(code[1], names)
    return names


def train(folder: str, epochs: int = len(ACCURACY)) -> tuple[list[int], float, list[Any]]:
    """The epochs that were run, and what the parts keep."""
    names = recipes()
    stopping = names["EarlyStopping"]("accuracy", 3)
    best = names["BestCheckpoints"]("accuracy", 2, f"{folder}/best")
    acc = Accelerator(cpu=True, seed=0, project_dir=folder, parts=[stopping, best])
    model = nn.Linear(2, 1)
    loader: Any = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=1)
    model, optimizer, loader = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    acc.resume()
    numbers = []
    for epoch in acc.epochs(len(ACCURACY)):
        if epoch == epochs:
            break  # as if it were killed in this epoch
        for x in loader:
            acc.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
        numbers.append(epoch)
        acc.log({"accuracy": ACCURACY[epoch]})
        acc.save_state()
    acc.end_training()
    return numbers, stopping.best, best.kept


@pytest.mark.parametrize("processes", [1, 2])
def test_a_resumed_run_stops_and_keeps_as_an_uninterrupted_one(ranks: Any, tmp_path: Path, processes: int) -> None:
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    updates = 4 // processes  # in an epoch
    expected = [(0.7, f"{7 * updates:08d}"), (0.7, f"{4 * updates:08d}")]
    for numbers, best, kept in ranks(train, whole, processes=processes):
        assert numbers == list(range(7)) and best == 0.7
        assert [(value, path.rpartition("-")[2]) for value, path in kept] == expected
    ranks(train, parts, 4, processes=processes)
    for numbers, best, kept in ranks(train, parts, processes=processes):
        assert numbers == [4, 5, 6] and best == 0.7
        assert [(value, path.rpartition("-")[2]) for value, path in kept] == expected
    names = sorted(path.name for path in (tmp_path / "parts" / "best").glob("step-*"))
    assert names == sorted(f"step-{number}" for _, number in expected)
    for numbers, *_ in ranks(train, parts, processes=processes):
        assert numbers == []  # it was stopped
