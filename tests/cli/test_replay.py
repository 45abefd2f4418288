"""``easymp replay``: a run goes again to an update, bit for bit, and stops in front of its step."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from easymp import Accelerator, SettingError, Settings
from easymp.base import env
from easymp.cli import main
from easymp.parts import ring

from ..site import PATH

SCRIPT = """
import sys, zlib
import torch
from torch import nn
from easymp import Accelerator, Settings

bad, rate = int(sys.argv[1]), float(sys.argv[2])
ring = Settings(replay=8)
acc = Accelerator(mixed_precision="no", seed=3, project_dir="run", log_with="none", cpu=True, settings=ring)
data = [(torch.randn(8, generator=torch.Generator().manual_seed(i)), i % 4) for i in range(96)]
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(rate), nn.Linear(16, 4))
optimizer, loader = torch.optim.AdamW(model.parameters(), lr=0.01), torch.utils.data.DataLoader(data, 8, shuffle=True)
model, optimizer, loader = acc.prepare(model, optimizer, loader)
acc.resume()
for epoch in acc.epochs(2):
    for x, y in loader:
        if optimizer.updates + 1 == bad and acc.process_index == acc.num_processes - 1:
            x[0] = float("nan")
        acc.backward(nn.functional.cross_entropy(model(x), y))
        norm = acc.clip_grad_norm_(model.parameters(), 1.0)
        if optimizer.updates + 1 == bad:
            every = [t for p in model.parameters() for t in (p.detach(), p.grad)]
            acc.print("bits", zlib.crc32(b"".join(t.numpy().tobytes() for t in every)), flush=True)
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.updates == 5:
            acc.save_state()
            acc.save_model(model, "weights")
acc.print("ended")
acc.end_training()
"""
# A run that goes on from another one's checkpoints, by a closure.
CLOSURE = """
import sys
import torch
from torch import nn
from easymp import Accelerator, Settings

folder, begin = sys.argv[1:]
ring = Settings(replay=8)
acc = Accelerator(mixed_precision="no", seed=3, project_dir=folder, log_with="none", cpu=True, settings=ring)
data = [(torch.randn(8, generator=torch.Generator().manual_seed(i)), i % 4) for i in range(64)]
model = nn.Linear(8, 4)
loader = torch.utils.data.DataLoader(data, 8, shuffle=True)
model, optimizer, loader = acc.prepare(model, torch.optim.LBFGS(model.parameters(), max_iter=3), loader)
acc.load_state("first/checkpoints/step-00000002") if begin == "load" else acc.resume(begin)
for x, y in loader:
    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        acc.backward(loss)
        return loss
    optimizer.step(closure)
    if optimizer.updates == 2 and folder == "first":
        acc.save_state()
acc.end_training()
"""
LOOK = """
import zlib
def before_forward(acc, models):
    models[0].register_forward_hook(lambda *_: acc.print("forward", flush=True))
def before_step(acc, models):
    every = [t for p in models[0].parameters() for t in (p.detach(), p.grad)]
    acc.print("bits", zlib.crc32(b"".join(t.numpy().tobytes() for t in every)), flush=True)
"""


def call(folder: Path, *arguments: str, typed: str = "") -> tuple[int, str]:
    """The exit code and the output of a command of easymp."""
    command, variables = [sys.executable, "-m", "easymp", *arguments], ring.env.merged({"PYTHONPATH": PATH})
    process = subprocess.run(command, cwd=folder, input=typed, capture_output=True, text=True, env=variables)
    return process.returncode, process.stdout + (process.stderr if process.returncode else "")


def trained(folder: Path, processes: int, *arguments: str) -> str:
    """Train; returns the line about the update that is looked at."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "look.py").write_text(LOOK)
    code, output = call(folder, "launch", "--processes", str(processes), "train.py", *arguments)
    assert code == 0 and "ended" in output, output
    return re.search(r"bits \d+", output)[0]  # type: ignore[index]


def files(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.slow
def test_hooks_see_the_bits_of_the_run(tmp_path: Path, processes: int) -> None:
    bits = trained(tmp_path, processes, "9", "0.2")
    before = files(tmp_path)
    code, output = call(tmp_path, "replay", "run", "--step", "9", "--hooks", "look.py", "--nonfinite")
    assert code == 0, output
    assert bits in output and output.count("forward") == 1 and "ended" not in output
    loss = "nan" if processes == 1 else r"\d\.\d+"  # of rank 0
    place = rf"epoch {processes - 1}, samples \d+ to \d+ \(indices"
    headline = rf"step of update 9 \(AdamW\); loss {loss}; gradient norm nan; {place}"
    assert re.search(headline, output), output
    assert "step-00000005. 4 updates of the run's ring: losses, gradient norms, loss scale and places" in output
    assert "Random streams" not in output
    rank = " (rank 1)" if processes == 2 else " (rank 0)"
    assert "First not finite: the inputs of the model (Sequential), given to the model" in output and rank in output
    assert files(tmp_path) == before


@pytest.mark.slow
def test_what_else_it_says(tmp_path: Path) -> None:
    bits = trained(tmp_path, 1, "9", "0.2")
    script = ("--", "train.py", "9", "0.3")
    code, output = call(tmp_path, "replay", "run", "--step", "9", *script)
    assert code == 1 and "It is not the run. On rank 0, update 6: the loss is" in output, output
    code, output = call(tmp_path, "replay", "run", "--step", "3")
    assert code == 0 and "from the beginning of the script. 3 updates of the run's ring" in output, output
    code, output = call(tmp_path, "replay", "run", "--step", "99")
    assert code == 2 and "The script has ended after update 24: update 99 never came." in output, output
    code, output = call(tmp_path, "replay", "run", "--step", "9", "--pdb", typed="p x.shape, optimizer.updates\nc\n")
    assert code == 0 and "(torch.Size([8, 8]), 8)" in output, output
    shutil.rmtree(tmp_path / "run" / "replay")
    code, output = call(tmp_path, "replay", "run", "--step", "9", "--hooks", "look.py", "--", "train.py", "9", "0.2")
    assert code == 0 and bits in output and "The run kept no updates, so nothing could be compared" in output, output


@pytest.mark.slow
def test_closures_and_runs_that_begin_from_others(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CLOSURE)
    (tmp_path / "look.py").write_text("def before_forward(acc, models): print('begins')\ndef before_step(*_): pass")
    for folder, begin in (("first", "first/checkpoints"), ("second", "first/checkpoints"), ("third", "load")):
        command, variables = [sys.executable, "train.py", folder, begin], ring.env.merged({"PYTHONPATH": PATH})
        assert subprocess.run(command, cwd=tmp_path, env=variables).returncode == 0
        code, output = call(tmp_path, "replay", folder, "--step", "3", "--hooks", "look.py")
        assert code == 0 and "begins" in output, output
        assert "first/checkpoints/step-00000002. 1 update of the run's ring" in output, output
    code, output = call(tmp_path, "replay", "third", "--step", "1")
    assert code == 1 and "has update 2 already, and the replay stops in front of 1" in output, output


def test_a_run_without_an_update_leaves_the_ring(tmp_path: Path) -> None:
    Accelerator(cpu=True, project_dir=tmp_path, settings=Settings(replay=4)).end_training()
    assert not (tmp_path / "replay").exists()


def start_run(folder: Path, **facts: Any) -> None:
    script = {"script": str(folder / "train.py"), "module": False, "arguments": [], "folder": str(folder)}
    line = {**script, "ranks": 2, "device": "cpu"}
    (folder / "replay").mkdir(exist_ok=True)
    (folder / "replay" / "rank-0.jsonl").write_text(json.dumps({**line, **facts}) + "\n")


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    run = ("replay", str(tmp_path), "--step", "3")
    monkeypatch.setattr(env, "script", lambda: "there.py")
    with Accelerator(cpu=True, project_dir="logged") as acc:
        acc.log({"loss": 1.0})
    cases = [
        (None, ("replay", "nowhere", "--step", "3"), "'nowhere' is not a folder"),
        (None, ("replay", str(tmp_path), "--step", "0"), "argument --step: '0' is not a whole number of at least 1"),
        (None, run, "has no record of its script's arguments and updates: a run keeps these under Settings(replay=64)"),
        (
            None,
            ("replay", "logged", "--step", "3"),
            f"a run of {env.script()}, and has no record of its script's arguments",
        ),
        (None, (*run, "--hooks", "no.py"), "--hooks 'no.py' is not a file"),
        ({}, (*run, "-m"), "-m is for a module's name after --"),
        ({}, (*run, "--pdb"), "--pdb with 2 processes, which share one terminal"),
        ({}, (*run, "--processes", "3"), "--processes 3: the run had 2, and replays on as many"),
        ({"device": "xpu"}, run, "the run had 2 processes, each on a device of xpu, and this machine has"),
        ({"script": "/gone/train.py"}, run, "'/gone/train.py' is not a file"),
    ]
    for facts, arguments, sentence in cases:
        if facts is not None:
            start_run(tmp_path, **facts)
        assert main(arguments) == 2 and sentence in capsys.readouterr().err, sentence
    with pytest.raises(
        SettingError, match=r"replay=4 appends to a file beside the checkpoints, and 'memory://run' is a URL"
    ):
        Accelerator(cpu=True, project_dir="memory://run", settings=Settings(replay=4))


def test_the_ring_keeps_the_last_updates_of_one_line(tmp_path: Path) -> None:
    def entry(update: int, optimizer: int = 0) -> dict[str, Any]:
        return {"update": update, "optimizer": optimizer}

    entries = ring.Entries()
    for update in (1, 2, 3, 4, 5, 3):  # a rollback after the fifth
        entries.put(entry(update), size=4)
        entries.put(entry(2 * update, optimizer=1), size=4)
    assert sorted(entries) == [(2, 0), (3, 0), (6, 1)]
    file = tmp_path / "rank-0.jsonl"
    file.write_text('{"script": "a.py"}\n{"update": 7, "optimizer": 0}\n{"update": 8, "opti')  # killed
    assert ring.read(str(file)) == ({"script": "a.py"}, {(7, 0): entry(7)})


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_leaves_nothing_behind(tmp_path: Path, processes: int) -> None:
    trained(tmp_path, processes, "7", "0")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    wait = "import os, time\ndef before_step(*_):\n    print('at', os.getpid(), flush=True)\n    time.sleep(600)\n"
    (tmp_path / "wait.py").write_text(wait)
    command = [sys.executable, "-m", "easymp", "replay", "run", "--step", "7", "--hooks", "wait.py"]
    variables = ring.env.merged({"PYTHONPATH": PATH, "TMPDIR": str(scratch)})
    with subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True) as replay:
        assert replay.stdout is not None
        rank = int(next(line for line in replay.stdout if "at " in line).split("at ")[1])
        replay.terminate()
        assert replay.wait(60) == 130
    assert not list(scratch.glob("easymp-*")) and not Path(f"/proc/{rank}").exists()
