"""Logging through the Accelerator: what lands in the file, on which rank, and after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from easymp import Accelerator
from easymp.errors import SettingError


def rows(folder: Path | str, run: str = "log") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / f"{run}.jsonl").read_text().splitlines()]


def test_rows_are_json_lines_in_the_projects_folder(tmp_path: Path) -> None:
    acc = Accelerator(cpu=True, project_dir=tmp_path)
    loss = torch.tensor(1.0)
    acc.log({"loss": loss, "phase": "train", "parts": {"a": 1, "b": None}})
    loss += 1  # what was logged does not change
    acc.log({"loss": loss}, step=7)
    assert not list(tmp_path.iterdir())  # nothing yet: rows wait for a second
    acc.end_training()
    first, second = rows(tmp_path)
    assert {**first, "_time": 0} == {"_step": 0, "_time": 0, "loss": 1.0, "phase": "train", "parts/a": 1}
    assert (second["_step"], second["loss"]) == (7, 2.0) and second["_time"] >= first["_time"] > 1e9
    about = json.loads((tmp_path / "log.json").read_text())
    assert about["starts"][0]["config"]["easymp"]["plan"]["processes"] == 1


@pytest.mark.parametrize("value", [torch.ones(2), object(), [1.0], torch.tensor(1j)], ids=str)
def test_what_is_no_number_is_refused(tmp_path: Path, value: Any) -> None:
    with Accelerator(cpu=True, project_dir=tmp_path) as acc, pytest.raises(SettingError, match=r"log.*'x'"):
        acc.log({"x": value})
