"""``easymp prove --kill``: trainings go on as if they were not killed, or what a script does not save is named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from easymp.base import env
from easymp.cli import main
from easymp.cli.prove.kills_rank import assignments

from ..site import PATH

SCRIPT = """
import random
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler, TensorDataset

from easymp import Accelerator, DataLoaderConfiguration

kinds = sys.argv[1].split(",")
kind = kinds[0]


class Shuffled(Sampler):
    def __init__(self):
        self.rng = random.Random(0)

    def __iter__(self):
        return iter(self.rng.sample(range(64), 64))

    def __len__(self):
        return 64


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1 * ("dropout" in kinds)), nn.Linear(16, 4))
        self.register_buffer("scale", torch.ones(()), persistent=kind != "buffer")

    def forward(self, x):
        if self.training:
            self.scale += 0.01
        return self.layers(x) * self.scale


class Counter:
    steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def main():
    acc = Accelerator(
        gradient_accumulation_steps=1 + ("accumulation" in kinds),
        ema_decay=0.9 if "ema" in kinds else None,
        dataloader_config=DataLoaderConfiguration(split_batches=kind not in ("sampler", "whole")),
    )
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(64, 8, generator=generator), torch.randint(4, (64,), generator=generator))
    order = {"sampler": Shuffled()} if kind == "sampler" else {"shuffle": True}
    loader, model, second = DataLoader(data, 8, **order), Net(), nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    other_optimizer = torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
    if "scheduler" in kinds:
        model, optimizer, loader = acc.prepare(model, optimizer, loader)
    else:
        model, optimizer, scheduler, loader = acc.prepare(model, optimizer, scheduler, loader)
    noise, counter = torch.Generator().manual_seed(1), Counter()
    acc.register_for_checkpointing(counter)
    average = {name: value.clone() for name, value in model.state_dict().items()}
    steps, begin = 0, time.time()
    path = acc.resume() if kind != "anew" else None
    for epoch in range(3) if kind == "epochs" else acc.epochs(3):
        for i, (x, y) in enumerate(loader):
            if "noise" in kinds:
                x = x + 0.1 * torch.randn(x.shape, generator=noise)
            if kind == "clock":
                x = x + time.time() % 1
            with acc.accumulate(model):
                logits = second(model(x)) if kind == "second" else model(x)
                loss = F.cross_entropy(logits, y)
                counter.steps += 1
                if kind == "steps":
                    steps += 1
                    loss = loss * min(1.0, steps / 20)
                acc.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if kind == "second":
                other_optimizer.step()
                other_optimizer.zero_grad()
            if kind == "average":
                for name, value in model.state_dict().items():
                    average[name].lerp_(value, 0.1)
            seconds = time.time() - begin
            if acc.sync_gradients and optimizer.updates % 3 == 0 and kind != "unsaved":
                acc.save_state("../../saved" if kind == "elsewhere" else None, async_="asynchronous" in kinds)
    acc.end_training()


main()
"""


@pytest.fixture
def killed(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Runs ``easymp prove --kill``; returns its JSON with the exit code."""
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(arguments: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "easymp", "prove", "train.py", "--json", *arguments.split()]
        variables = env.merged({"PYTHONPATH": PATH})
        process = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert process.stdout, process.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
        return {"code": process.returncode, **json.loads(process.stdout)}

    return run


RESUMED = "after kill 1 the script goes on from update "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sentences"),
    [
        ("-- sampler", [", with another loader.sampler.rng (Random), and fails: "]),
        (
            "-- noise,scheduler",
            [
                ", and at update 22 local `",
                "local `noise` at train.py:67 (Generator) differs",
                "local `scheduler` at train.py:62 (CosineAnnealingLR) differs",
            ],
        ),
        ("-- steps", [", and at update 22 local `steps` at train.py:70 is 1, and not 22"]),
        ("-- average", [", and at update 22 local `average` at train.py:69 differs; all else is equal"]),
        ("-- epochs", ["ended after 24: at update 22 local `epoch` at train.py:72 is 0, and not 2"]),
        ("-- buffer", [", and at update 22 model.scale (a buffer that is not persistent) is "]),
        ("-- second", ["; local `other_optimizer` at train.py:61 (SGD) differs"]),
        ("--processes 1,2 -- second", ["; local `other_optimizer` at train.py:61 (SGD) differs"]),
    ],
)
def test_what_a_script_does_not_save_is_named(killed, arguments, sentences):
    record = killed(f"--kill 1 {arguments}")
    assert record["code"] == 1 and RESUMED in record["sentence"], record
    assert [sentence for sentence in sentences if sentence not in record["sentence"]] == [], record


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        "--kill 3 -- plain",
        "--kill 3 -- accumulation,ema,asynchronous,dropout",
        # Bit for bit, then within rounding; all ranks die at once, and not after their warm commands.
        pytest.param("--kill 2 --processes 2,2,1 --no-dropout -- dropout", marks=pytest.mark.cold),
    ],
)
def test_sound_scripts_raise_no_alarm(killed, arguments):
    record = killed(arguments)
    assert (record["code"], record["verdict"]) == (0, "proven"), record
    assert len(record["kills"]) == int(arguments.split()[1]) and {kill["update"] for kill in record["kills"]} != {0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--kill 1 -- unsaved", "makes 24 updates without save_state()"),
        ("--kill 1 -- anew", "begins anew though there is a checkpoint"),
        ("--kill 1 -- elsewhere", "where a real run may have its checkpoints"),
        ("--kill 1 -- clock", "two uninterrupted runs differ at update 1: losses"),
        ("--kill 1 --processes 2,1 -- dropout", "each update draws random numbers"),
    ],
)
def test_what_cannot_be_compared(killed, arguments, sentence):
    record = killed(arguments)
    assert record["code"] == 2 and sentence in record["sentence"], record


def test_names_that_carry_a_value_from_round_to_round():
    def train(items):
        steps, best, first = 0, 1.0, None
        for epoch in range(2):
            for i, item in enumerate(items):
                steps += 1
                loss = item * i
                if loss < best:
                    best = loss
                first = first or epoch
        return steps, best, first

    names = assignments(train.__code__)
    assert [name for name, (_, in_each_round) in names.items() if in_each_round] == ["epoch", "i", "item", "loss"]
    begin = train.__code__.co_firstlineno
    assert {name: line - begin for name, (line, _) in names.items()}["best"] == 1


def test_several_numbers_of_processes_are_for_kills(tmp_path, capsys):
    (tmp_path / "train.py").write_text("")
    assert main(["prove", str(tmp_path / "train.py"), "--processes", "2,1"]) == 2
    assert "--processes with several numbers is for --kill" in capsys.readouterr().err
