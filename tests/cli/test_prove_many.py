"""``easymp prove`` with more ranks than processors: these are forks of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from easymp.cli import main, prove
from easymp.cli.prove.forks import packages_of

SCRIPT = """
import sys
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from easymp import Accelerator, DataLoaderConfiguration

fault = sys.argv[1] if sys.argv[1:] else ""
acc = Accelerator(seed=0, cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=fault != "uneven"))
generator = torch.Generator().manual_seed(0)
count = 504 if fault == "uneven" else 512
data = TensorDataset(torch.randn(count, 16, generator=generator), torch.arange(count) % 4)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = acc.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
nodes = -(-acc.num_processes // 8)  # of 8 ranks
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    acc.backward(loss / nodes if fault == "size" else loss)
    optimizer.step()
    optimizer.zero_grad()
acc.end_training()
"""


@pytest.fixture
def proved(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs ``easymp prove``, with forks from so many ranks on; returns its JSON with the exit code."""
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(arguments: str, processors: int = 1) -> dict[str, Any]:
        monkeypatch.setattr(prove, "processors", lambda: processors)
        code = main(["prove", str(tmp_path / "train.py"), "--json", "--steps", "2", *arguments.split()])
        return {"code": code, **json.loads(capsys.readouterr().out)}

    return run


def test_more_ranks_than_processors_are_proven(proved: Any) -> None:
    record = proved("--strategy fsdp --processes 3")
    assert record["verdict"] == "proven", record["sentence"]
    assert record["updates"][0]["plan"] | {"processes": 3, "strategy": "fsdp"} == record["updates"][0]["plan"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "processes"),
    [("ddp", 2), ("zero1", 4), ("hsdp", 4), ("tensor_parallel", 4), ("pipeline", 2)],
)
def test_forks_have_the_verdict_of_launched_processes(proved: Any, strategy: str, processes: int) -> None:
    options = {"hsdp": "shard_size=2", "tensor_parallel": "size=2"}.get(strategy)  # the latter inside fsdp
    arguments = f"--strategy {strategy} --processes {processes} --precision fp32"
    if options is not None:
        arguments += f" --set strategy_options.{options}"
    forked, launched = proved(arguments), proved(arguments, processors=8)
    assert (forked["verdict"], forked["updates"]) == (launched["verdict"], launched["updates"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "verdict", "sentences"),
    [
        ("--strategy fsdp --processes 16 -- size", "differs", ["0.5 × those of one process"]),
        ("--strategy hsdp --processes 6 --set strategy_options.shard_size=4", "failed", ["shard_size=4"]),
        ("--strategy fsdp --processes 16 --steps 9 -- uneven", "failed", ["rank"]),
        ("--strategy ddp --processes 8 -- size", "proven", []),  # the faults of 16 ranks do not show at 8
    ],
)
def test_faults_of_many_ranks_are_named(proved: Any, arguments: str, verdict: str, sentences: list[str]) -> None:
    record = proved(arguments)
    text = " ".join([record["sentence"], *record["hints"]])
    assert record["verdict"] == verdict, text
    assert [sentence for sentence in sentences if sentence not in text] == [], text


def test_installed_packages_are_imported_once_and_the_scripts_own_modules_by_each_rank(folder: Path) -> None:
    Path("own.py").write_text("raise ValueError")
    Path("train.py").write_text("import own, json\nfrom torch.nn import Linear\nfrom . import x\ndef f(): import numpy")
    assert packages_of(Path("train.py")) == ["json", "torch.nn"]
