"""The seam of parts: events in order on one and two processes, errors and states of a script's parts, parts that go."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import easymp
from easymp import Accelerator, Part, SettingError
from easymp.base.parts import EVENTS
from easymp.registry import PARTS
from easymp.training.state import accelerators

from ..pairs import Counter
from ..strategies.models import refuses, whole
from ..words import make_accelerator


class Recorder(Part):
    """Writes down the events of an update."""

    name = "recorder"

    def __init__(self) -> None:
        self.events: list[str] = []
        self.sums: list[float] = []

    def gradients(self, pairs: Any) -> None:
        self.events.append("gradients")
        self.sums.append(sum(float(whole(gradient).sum()) for _, gradient in pairs))

    def epoch_ends(self, epoch: int) -> bool:
        self.events.append(f"epoch {epoch} ends")
        return epoch == 1


def recording(event: str) -> Any:
    return lambda self, *_: self.events.append(event)


UPDATE = "batch_ready forward loss after_backward gradients norm step stepped zero_grad batch".split()
MICRO_STEP = "batch_ready forward loss after_backward batch".split()
for _event in set(UPDATE) - {"gradients"}:
    setattr(Recorder, _event, recording(_event))


def train(part: Part, strategy: str | None = None, epochs: int = 1, **settings: Any) -> Accelerator:
    """Two updates of two micro-batches an epoch; global batches are the same on one process and on two."""
    settings |= {"cpu": True, "strategy": strategy, "seed": 0, "log_with": "none"}
    acc = make_accelerator(parts=[part], **settings)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    batches = DataLoader(torch.arange(32.0).view(8, 4) / 32, batch_size=2 // acc.num_processes)
    model, optimizer, batches = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), batches)
    for _ in acc.epochs(epochs):
        for x in batches:
            with acc.accumulate(model):
                acc.backward(model(x).square().mean())
                acc.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return acc


def test_events_come_in_order() -> None:
    recorder = Recorder()
    train(recorder, epochs=5, gradient_accumulation_steps=2).end_training()
    epoch = [*MICRO_STEP, *UPDATE] * 2
    assert recorder.events == [*epoch, "epoch 0 ends", *epoch, "epoch 1 ends"]  # which ends the training


def sums_of_gradients(strategy: str | None) -> list[float]:
    recorder = Recorder()
    train(recorder, strategy, gradient_accumulation_steps=2).end_training()
    return recorder.sums


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_final_gradients_are_those_of_one_process(ranks: Any, strategy: str) -> None:
    expected = sums_of_gradients(None)
    for sums in ranks(sums_of_gradients, strategy):
        assert sums == pytest.approx(expected, rel=1e-5)


def hearing(event: str) -> Any:
    def hear(self: Any, *_: Any, **__: Any) -> None:
        self.heard.add(event)

    return hear


def test_a_part_of_the_script_hears_every_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    events = set(EVENTS) - {"state", "verdict"}  # the latter is of a gradient that is not finite
    part_class = type("Hearing", (Part,), {"name": "hearing", "heard": set(), **{e: hearing(e) for e in events}})
    part_class.state = lambda self: {"updates": 2}
    part = part_class()
    with Accelerator(cpu=True, mixed_precision="no", parts=[part], log_with="jsonl") as acc:
        model = nn.Linear(4, 2)
        model, optimizer, batches = acc.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(torch.ones(4, 4), batch_size=2)
        )
        acc.resume()
        for _ in acc.epochs(1):
            for x in batches:
                acc.backward(model(x).square().mean())
                acc.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                acc.log({"loss": 1.0})
        acc.load_state(acc.save_state())
    assert part.heard == events


class Failing(Part):
    name = "failing"

    def stepped(self, optimizer: Any) -> None:
        raise ZeroDivisionError("no data")


def test_an_error_names_its_part() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        train(Failing())
    assert caught.value.__notes__ == ["raised by part 'failing' (Failing) in its stepped()"]
    for acc in accelerators():
        acc.close()


class Veto(Part):
    """Lets each second step change nothing, or leaves it out."""

    name = "veto"

    def __init__(self, leaves_out: bool) -> None:
        self._leaves_out, self._steps = leaves_out, 0

    def step(self, optimizer: Any) -> torch.Tensor | bool:
        self._steps += 1
        second = self._steps % 2 == 0
        return second if self._leaves_out else torch.tensor(float(second))


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16-true"])
@pytest.mark.parametrize("leaves_out", [False, True])
def test_a_part_vetoes_steps(leaves_out: bool, precision: str) -> None:
    acc = train(Veto(leaves_out), mixed_precision=precision)
    (optimizer,) = acc._prepared.optimizers
    assert optimizer.updates == (2 if leaves_out else 4) and acc.optimizer_step_was_skipped
    acc.end_training()


def test_checkpoints_keep_the_state_of_a_part(tmp_path: Path) -> None:
    acc = train(Counter())
    acc.save_state(tmp_path / "one")
    acc.end_training()
    counter = Counter()
    resumed = train(counter)
    resumed.load_state(tmp_path / "one")
    assert counter.updates == 4
    resumed.save_state(tmp_path / "two")
    resumed.end_training()
    without = train(Recorder())
    refuses(easymp.CheckpointError, "counter", without.load_state, tmp_path / "two")
    without.save_state(tmp_path / "three")
    without.end_training()
    missing = train(Counter())
    refuses(easymp.CheckpointError, "no state of part 'counter'", missing.load_state, tmp_path / "three")
    missing.end_training()


def test_wrong_parts_are_refused() -> None:
    refuses(SettingError, "is no easymp.Part", Accelerator, cpu=True, parts=["ema"])
    refuses(SettingError, "set `name` to a word", Accelerator, cpu=True, parts=[Part()])
    refuses(SettingError, "two parts have the name 'counter'", Accelerator, cpu=True, parts=[Counter(), Counter()])
    counter = Counter()
    with Accelerator(cpu=True, parts=[counter]):
        refuses(SettingError, "belongs to another open Accelerator", Accelerator, cpu=True, parts=[counter])
    with Accelerator(cpu=True, parts=[counter]) as acc:  # one after another
        assert counter.accelerator is acc


def other_parts() -> str:
    parts = [Counter(), Recorder()]
    with Accelerator(cpu=True, strategy="ddp", parts=parts if int(os.environ["RANK"]) else parts[::-1]) as acc:
        with pytest.raises(easymp.WorldError) as caught:
            acc.prepare(nn.Linear(2, 1))
    return str(caught.value)


def test_ranks_with_other_parts_are_refused(ranks: Any) -> None:
    for message in ranks(other_parts):
        assert "the ranks prepare different things" in message and "part counter" in message


# -- the core names no feature -----------------------------------------------------------------------------------------


def test_the_core_names_no_part() -> None:
    from easymp.optim import PreparedOptimizer
    from easymp.training.prepare import Preparation

    core = [Accelerator.backward, Accelerator.clip_grad_norm_, Accelerator.prepare]
    core += [PreparedOptimizer.step, Preparation.prepare]
    for function in core:
        tree = inspect.getsource(function)
        code = re.sub(r'""".*?"""', "", tree, flags=re.DOTALL)
        assert not [name for name in PARTS if re.search(rf"\b{name}\b", code)], function


DIGITS = """
import easymp
import torch
from torch import nn
from easymp import Accelerator

acc = Accelerator(cpu=True, seed=0, log_with="none", gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
x = torch.rand(64, 64, generator=torch.Generator().manual_seed(0))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x.sum(1) * 10).long() % 10), batch_size=8)
model, optimizer, loader = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
for epoch in acc.epochs(2):
    for inputs, targets in loader:
        with acc.accumulate(model):
            acc.backward(nn.functional.cross_entropy(model(inputs), targets))
            acc.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
place = acc.save_state()
acc.load_state(place)
acc.end_training()
print(optimizer.updates, easymp.__file__, sep="\\n")
"""


@pytest.mark.slow
def test_any_part_can_be_taken_out(tmp_path: Path) -> None:
    """Its line in the registry, and its file: nothing else in easymp changes."""
    package = Path(easymp.__file__).parent
    files = {PARTS.homes[name].partition(":")[0].replace(".", "/") + ".py" for name in PARTS}
    for number, file in enumerate(sorted(files)):
        copy = tmp_path / str(number) / "easymp"
        shutil.copytree(package, copy)  # with the byte code, which is valid for files of the same time
        (copy / file).unlink()
        registry = copy / "registry.py"
        home = file.removesuffix(".py").replace("/", ".")
        lines = re.sub(rf'^        "\w+": \(\s*"{home}:[^()]*\),\n', "", registry.read_text(), flags=re.MULTILINE)
        assert home not in lines
        registry.write_text(lines)
        variables = {**os.environ, "PYTHONPATH": str(copy.parent)}
        done = subprocess.run(
            [sys.executable, "-c", DIGITS], cwd=copy.parent, env=variables, capture_output=True, text=True, timeout=120
        )
        assert done.stdout.splitlines()[-2:] == ["8", f"{copy}/__init__.py"], (file, done.stderr[-2000:])
