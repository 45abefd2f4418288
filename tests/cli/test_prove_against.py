"""``easymp prove --against``: another Python, the package that a layer stands for, and a script before its move."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from easymp.cli import main, prove

from ..warm import COLD

PLAIN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(96, 16, generator=generator), torch.arange(96) % 4)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=8, shuffle=True)
PREPARE
for step, (x, y) in enumerate(loader):
    loss = nn.functional.cross_entropy(model(x), y) / 2
    BACKWARD
    if step % 2:
        optimizer.step()
        optimizer.zero_grad()
"""
PREPARE = """
from easymp import Accelerator, DataLoaderConfiguration
acc = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=False))
model, optimizer, loader = acc.prepare(model, optimizer, loader)
"""
SEEDED = PREPARE.replace("DataLoaderConfiguration(use_seedable_sampler=False)", "None").replace("cpu", "seed=0, cpu")
WITH_ACCELERATE = """
from accelerate import Accelerator
acc = Accelerator(cpu=True)
model, optimizer, loader = acc.prepare(model, optimizer, loader)
"""
WITH_FABRIC = """
import os
from lightning_fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
fabric.launch()
loader = fabric.setup_dataloaders(loader)
model, optimizer = fabric.setup(model, optimizer)
"""
BEFORE = PLAIN.replace("PREPARE", "").replace("BACKWARD", "loss.backward()")
MOVED = PLAIN.replace("PREPARE", PREPARE).replace("BACKWARD", "acc.backward(loss)")
# What another environment has: a torch whose GELU or AdamW is another.
PLANTED = {
    "module": "gelu = torch.nn.functional.gelu\ntorch.nn.GELU.forward = lambda self, x: gelu(x, approximate='tanh')",
    "setting": "init = torch.optim.AdamW.__init__\n"
    "torch.optim.AdamW.__init__ = lambda self, params, **k: init(self, params, **{**k, 'weight_decay': 0.1})",
    "nothing": "",
}


@pytest.fixture
def proved(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(script: str, against: str, arguments: str = "") -> dict[str, Any]:
        (folder / "train.py").write_text(script)
        code = main(["prove", "train.py", "--json", "--steps", "2", "--against", against, *arguments.split()])
        return {"code": code, **json.loads(capsys.readouterr().out)}

    return run


def assert_equal(record: dict[str, Any]) -> None:
    assert record["verdict"] == "proven", record["sentence"]
    for row in record["updates"]:
        assert row["gradients"]["largest"]["times"] < 0.1 and row["loss"]["times"] < 0.1


@pytest.mark.usefixtures("warm")
def test_a_moved_script_is_compared_with_the_plain_one(proved: Any, folder: Path) -> None:
    (folder / "before.py").write_text(BEFORE)
    assert_equal(proved(MOVED, "before.py"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "sentences"),
    [
        ("lr=0.01", "lr=0.02", ["lr of the optimizer is 0.01, and 0.02 here"]),
        ("nn.GELU()", "nn.ReLU()", ["the loss is", "the first layer whose output differs is 1 (ReLU)"]),
        ("acc.backward(loss)", "acc.backward(2 * loss)", ["the loss is", "All gradients are 0.5 ×"]),
        ("use_seedable_sampler=False", "data_seed=3", ["update 1 reads other samples here"]),
    ],
)
def test_what_a_move_changes_is_named(proved: Any, folder: Path, old: str, new: str, sentences: list[str]) -> None:
    (folder / "before.py").write_text(BEFORE)
    record = proved(MOVED.replace(old, new), "before.py")
    text = " ".join([record["sentence"], *record["hints"]])
    assert record["code"] and [sentence for sentence in sentences if sentence not in text] == [], text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "sentences"),
    [
        ("nothing", ["gave the losses, gradients and weights of one process in fp32"]),
        ("module", ["the first layer whose output differs is 1 (GELU)"]),
        ("setting", ["weight_decay of the optimizer is 0.1, and 0.01 on one process"]),
    ],
)
def test_another_python_is_compared(proved: Any, folder: Path, planted: str, sentences: list[str]) -> None:
    other = folder / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text(f"import torch\n{PLANTED[planted]}")
    (other / "python").write_text(f'#!/bin/sh\nPYTHONPATH="{other}:$PYTHONPATH" exec {COLD} "$@"\n')
    (other / "python").chmod(0o755)
    script = PLAIN.replace("PREPARE", SEEDED).replace("BACKWARD", "acc.backward(loss)")
    record = proved(script, str(other / "python"))
    text = " ".join([record["sentence"], *record["hints"]])
    assert (record["code"] == 0) == (planted == "nothing"), text
    assert [sentence for sentence in sentences if sentence not in text] == [], text


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("prepare", "backward", "library", "package"),
    [
        (WITH_ACCELERATE, "acc.backward(loss)", "accelerate", "accelerate"),
        (WITH_FABRIC, "fabric.backward(loss)", "fabric", "lightning_fabric"),
    ],
    ids=["accelerate", "fabric"],
)
def test_a_script_of_a_library_is_compared_with_the_library(
    proved: Any, prepare: str, backward: str, library: str, package: str, processes: int
) -> None:
    if find_spec(package) is None:  # and not imported here: lightning_fabric sets a variable
        pytest.skip(f"{package} is not installed")
    script = PLAIN.replace("PREPARE", prepare).replace("BACKWARD", backward)
    assert_equal(proved(script, library, f"--processes {processes}"))


@pytest.mark.slow
def test_more_ranks_than_processors_are_compared_with_the_reference(
    proved: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prove, "processors", lambda: 1)
    (folder / "before.py").write_text(BEFORE)
    record = proved(MOVED.replace("lr=0.01", "lr=0.02"), "before.py", "--processes 2")
    assert record["verdict"] != "proven", record["sentence"]
    (folder / "no-python").write_text("#!/bin/sh\nexit 3\n")
    (folder / "no-python").chmod(0o755)
    assert proved(MOVED, "./no-python", "--processes 2")["verdict"] == "not compared"


@pytest.mark.parametrize("word", ["plain", "no/such/python"])
def test_what_is_no_reference_is_refused(folder: Path, capsys: pytest.CaptureFixture[str], word: str) -> None:
    (folder / "train.py").write_text(MOVED)
    assert main(["prove", "train.py", "--against", word]) == 2
    assert f"--against {word}: pass the path of the script before its move" in capsys.readouterr().err
