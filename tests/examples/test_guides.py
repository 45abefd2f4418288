"""docs/moving-in/*.md: their programs run, before with nothing but the import lines changed, and after.

The blocks of Python that have the same word behind ``python`` are one program. Its old import lines give way to the new ones, as the
guide's ``diff`` blocks have them. `Net`, `data` and `loss_fn` are there, and a training leaves a `loss` below half of what it began with.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import easymp
from easymp import Accelerator
from easymp.compat import explain

from ..conftest import Ranks
from .run import ROOT

GUIDES = sorted(ROOT.glob("docs/moving-in/*.md"))
TRAININGS = ("before", "after")
ROOMS = ("logging", "toml")  # easymp.logging, easymp.toml


def blocks(text: str, language: str) -> list[tuple[str, str]]:
    """The words behind the language, and the code."""
    return re.findall(rf"^```{language}(?: (\w+))?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def changed(text: str) -> dict[str, str]:
    """New lines by the old ones."""
    pairs = pairwise(line for _, block in blocks(text, "diff") for line in block.splitlines())
    return {old[1:]: new[1:] for old, new in pairs if old.startswith("-") and new.startswith("+")}


def programs() -> list[Any]:
    """(guide, word, code)"""
    found: dict[tuple[Path, str], str] = {}
    for guide in GUIDES:
        text = guide.read_text(encoding="utf-8")
        for word, code in blocks(text, "python"):
            found[guide, word] = found.get((guide, word), "") + code
    return [pytest.param(*key, code, id="-".join([key[0].stem, key[1]])) for key, code in found.items()]


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs.float(), targets)  # torch 2.11 has no backward for two dtypes


def run(code: str, folder: str) -> tuple[float, float, str]:
    """The loss at the end and that of a model that has not been trained, and what the layers of easymp.compat say of themselves."""
    os.chdir(folder)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True)
    given = {"Net": Net, "data": TensorDataset(x, y), "loss_fn": loss_fn, "__name__": "__main__"}
    start = given["loss_fn"](Net()(x), y).item()
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, "guide", "exec"), given)
        return float(given.get("loss", start)), start, explain()


@pytest.mark.parametrize(("guide", "word", "code"), programs())
def test_its_programs_run(ranks: Ranks, tmp_path: Path, guide: Path, word: str, code: str) -> None:
    text = guide.read_text(encoding="utf-8")
    new = changed(text)
    moved = "\n".join(new.get(line, line) for line in code.splitlines())
    assert (word == "before") <= (moved != code.rstrip("\n"))
    (loss, start, told), _ = ranks(run, moved, str(tmp_path))
    if word in TRAININGS:
        assert loss < start / 2
    if word == "before":
        assert all(lines.strip() in told for _, lines in blocks(text, "text") if "→ easymp" in lines)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_what_it_names_is_there(guide: Path) -> None:
    text = guide.read_text(encoding="utf-8")
    assert "## What is not there" in text
    assert [name for name in re.findall(r"\bacc\.(\w+)", text) if not hasattr(Accelerator, name)] == []
    takes = inspect.signature(Accelerator).parameters
    assert [name for name in re.findall(r"\bAccelerator\((\w+)=", text) if name not in takes] == []
    assert [
        name
        for name in re.findall(r"\beasymp\.(\w+)", text)
        if not hasattr(easymp, name) and name not in ROOMS
    ] == []


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_the_readme_has_its_import_line(guide: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"(docs/moving-in/{guide.name})" in readme
    assert any(
        f"| `{old}` | `{new}` |" in readme for old, new in changed(guide.read_text(encoding="utf-8")).items()
    )
