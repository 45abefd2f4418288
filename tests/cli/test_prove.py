"""``easymp prove``: sound scripts are proven, and each planted fault is named, with its parameter or its cause."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from easymp.base import env
from easymp.cli import main, prove
from easymp.cli.harness import FAILURE, FINISHED, LATE, End
from easymp.cli.prove import rank
from easymp.settings import OVERRIDE

from ..examples.run import ROOT
from ..pool import RanksFailed

SCRIPT = """
import sys
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from easymp import Accelerator, DataLoaderConfiguration, Settings

fault = sys.argv[1] if sys.argv[1:] else ""


class Data(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return (x + torch.randn(8) if fault == "augmented" else x), y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d(16) if "batchnorm" in fault else nn.LayerNorm(16)
        self.body = nn.Sequential(nn.Linear(8, 16), norm, nn.GELU(), nn.Dropout(0.5 * (fault == "dropout")))
        self.qkv, self.mix, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        q, k, v = self.qkv(self.body(x)).chunk(3, -1)
        return self.head(self.mix(F.dropout(q * k.tanh() + v, 0.5 * (fault == "functional"))))


even = DataLoaderConfiguration(even_batches=fault != "uneven")
acc = Accelerator(dataloader_config=even, settings=Settings(convert_sync_batchnorm=fault == "synced-batchnorm"))
count = acc.num_processes
nodes = -(-count // 8)  # of 8 ranks
samples = {"uneven": 504, "nodes": 512}.get(fault, 80)
generator = torch.Generator().manual_seed(0)
data = Data(torch.randn(samples, 8, generator=generator), torch.randint(4, (samples,), generator=generator))
loader, model = DataLoader(data, 8, shuffle=True, drop_last=fault == "short"), Net()
if fault == "bf16-weights":
    model.bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (count if fault == "lr" else 1))
model, optimizer, loader = acc.prepare(model, optimizer, loader)
if fault == "left-out" and acc.process_index == 1:
    del optimizer.param_groups[0]["params"][1]
for epoch in range(2):
    for x, y in loader:
        with acc.accumulate(model):
            if fault == "by-itself":
                F.cross_entropy(acc.unwrap_model(model)(x), y).backward()
            elif fault == "outside":
                acc.backward(F.cross_entropy(model.head(model.body(x)), y))
            else:
                loss = F.cross_entropy(model(x.to(model.head.weight.dtype) if fault == "bf16-weights" else x), y)
                divisors = {"divided": acc.gradient_accumulation_steps, "ranks": count, "nodes": nodes}
                acc.backward(loss / divisors.get(fault, 1))
            acc.clip_grad_norm_(model.parameters(), 1e3)
            optimizer.step()
            optimizer.zero_grad()
if fault == "fails":
    raise ValueError("at the end")
acc.end_training()
"""


def play(folder: str) -> None:
    """`rank.main` in a process that is not the script's own."""
    state = sys.argv, sys.path[:], sys.modules["__main__"]
    try:
        rank.main(Path(folder))
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = state


@pytest.fixture
def proved(ranks, tmp_path, monkeypatch, capsys):
    """Runs ``easymp prove`` with the ranks in the pool; returns its JSON with the exit code."""

    def run_once(head: str, command: list[str], folder: Path, plan: dict[str, str], timeout: Any) -> End:
        settings = {name: env.read(name) for name in env.names(env.PREFIX)}
        pairs = [f"{name}={value}" for name, value in {**plan, "project_dir": folder}.items()]
        settings[OVERRIDE] = " ".join([env.read(OVERRIDE) or "", *pairs])
        processes = int(command[command.index("--processes") + 1])
        try:
            ranks(play, command[-1], processes=processes, env=settings)
        except RanksFailed as error:
            return End(FAILURE, str(error).strip().splitlines()[-1], 0.0, 0.0)
        return End(FINISHED, "", 0.0, 0.0)

    monkeypatch.setattr(prove, "run_once", run_once)
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(arguments: str, script: Path = tmp_path / "train.py") -> dict[str, Any]:
        code = main(["prove", str(script), "--json", *arguments.split()])
        return {"code": code, **json.loads(capsys.readouterr().out)}

    return run


DDP = "--strategy ddp --processes 2 --precision fp32"
SPLIT = "--strategy tensor_parallel --processes 2 --precision fp32 --set strategy_options.plan="
ACCUMULATED = "--set gradient_accumulation_steps="
PLANNED = "the run under the plan failed: "


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("arguments", "code", "sentences"),
    [
        (f"{DDP} -- batchnorm", 1, ["first layer whose output differs is body.1 (BatchNorm1d)", "convert_sync"]),
        (f"{DDP} -- by-itself", 1, ["the gradient of body.0.weight", "on rank 1 and", "accelerator.backward(loss)"]),
        (f"{DDP} -- left-out", 1, ["the weight of body.0.bias", "on rank 1 and", "The ranks step other"]),
        slow(f"{DDP} -- outside", 1, [PLANNED, "the model was not called"]),
        slow("--strategy fsdp --processes 2 -- outside", 1, [PLANNED, "a Linear is called outside of the model's"]),
        (f"{DDP} {ACCUMULATED}2 -- divided", 1, ["0.5 × those of one", "gradient_accumulation_steps (2)"]),
        slow(f"{DDP} -- ranks", 1, ["the loss is", "divides the loss by the number of processes (2)"]),
        slow(f"{DDP} -- lr", 1, ["lr of the optimizer is 0.02, and 0.01 on one process"]),
        (SPLIT + "{qkv='colwise',mix='rowwise'}", 1, ["first layer whose output differs is mix (Linear)"]),
        (f"{DDP} -- dropout", 2, ["body.3 (Dropout) draws random numbers", "--no-dropout"]),
        slow(f"{DDP} --no-dropout -- functional", 2, ["the model (Net) draws random numbers"]),
        slow(f"{DDP} -- augmented", 2, ["update 1 reads other samples"]),
        slow("--strategy local_sgd --processes 2", 2, ["local_sgd"]),
        slow(f"{DDP} --steps 100 -- fails", 1, [PLANNED, "ValueError: at the end"]),
    ],
)  # fmt: skip
def test_faults_are_named(proved, arguments, code, sentences):
    record = proved(arguments)
    assert record["code"] == code, record["sentence"]
    text = " ".join([record["sentence"], *record["hints"]])
    assert [sentence for sentence in sentences if sentence not in text] == [], text
    if record["verdict"] == "differs" and "gradients" in record["updates"][-1] and "lr of" not in text:
        # far outside of what rounding explains
        assert record["updates"][-1]["gradients"]["largest"]["times"] > 100


@pytest.mark.parametrize(
    ("name", "status", "verdict"),
    [
        (prove.UNDER_PLAN, FAILURE, "failed"),  # exit code 1, as of rehearse and compare
        (prove.UNDER_PLAN, LATE, "not compared"),
        ("on one process", FAILURE, "not compared"),
    ],
)
def test_a_script_that_fails_under_the_plan_is_a_verdict(name, status, verdict):
    record = prove.judge([], "", {name: End(status, "ValueError: no", 0.0, 0.0)}, 5)
    assert record["verdict"] == verdict and f"the run {name} failed: ValueError: no." in record["sentence"]
    assert prove.CODES == {"proven": 0, "differs": 1, "failed": 1, "not compared": 2}


@pytest.mark.parametrize(
    ("arguments", "updates"),
    [
        (DDP, 5),
        slow(f"{DDP} -- synced-batchnorm", 5),
        slow(f"{DDP} --no-dropout -- dropout", 5),
        slow(f"{DDP} --steps 100 {ACCUMULATED}3 -- short", 1),  # of an epoch of 5 micro-batches
        slow(SPLIT + "{qkv='colwise_rep',mix='rowwise_rep'}", 5),
        slow(SPLIT.replace("fp32", "bf16") + "{qkv='colwise_rep',mix='rowwise_rep'}", 5),
        slow("--precision bf16-true -- bf16-weights", 5),
        slow("--precision O2 -- bf16-weights", 5),
        slow("--processes 2 --steps 9 --precision fp16 --set scaler_options.init_scale=4194304", 0),
        slow("--strategy zero1 --processes 2 --precision bf16 --set strategy_options.shard_gradients=true", 5),
        slow(f"--strategy pipeline --processes 2 --precision bf16 {ACCUMULATED}2", 5),
    ],
)  # fmt: skip
def test_sound_plans_are_proven(proved, arguments, updates):
    assert_proven(proved(arguments), updates)


def assert_proven(record: dict[str, Any], updates: int) -> None:
    assert (record["verdict"], record["code"]) == ("proven", 0), record["sentence"]
    compared = [row for row in record["updates"] if "weights" in row]
    assert len(compared) == updates or (not updates and 0 < len(compared) < len(record["updates"]))
    for row in compared:  # well inside of what the precision explains
        assert all(row[kind]["largest"]["times"] < 0.5 for kind in ("gradients", "weights"))
        assert row.get("loss", {"times": 0})["times"] < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("digits.py", "--strategy pipeline --processes 2 --precision fp32 -- --accumulation 2"),
        ("approaches/with_easymp.py", "--strategy fsdp --processes 2 --precision fp16"),
        # of two optimizers
        ("char_gpt.py", "--strategy fsdp --processes 2 --precision fp32 -- --windows 64 --batch-size 8"),
    ],
)
def test_the_examples_are_proven(proved, script, arguments):
    assert_proven(proved(f"--steps 2 {arguments}", ROOT / "examples" / script), 4 if "gpt" in script else 2)


@pytest.mark.slow
def test_the_command_proves_a_script_of_deepspeed(folder):
    script = str(ROOT / "examples/approaches/with_deepspeed.py")
    arguments = [sys.executable, "-m", "easymp", "prove", script, "--processes", "2", "--steps", "2"]
    process = subprocess.run([*arguments, "--output", "kept"], capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.startswith("Proven: 2 updates under zero1 on 2 processes")
    assert (folder / "kept/under-the-plan/output.txt").exists()


def test_a_script_without_an_accelerator_and_a_folder_that_is_there(proved, folder, capsys):
    (folder / "plain.py").write_text("print('hello')")
    record = proved("", folder / "plain.py")
    assert record["code"] == 2 and "no update was made with a prepared optimizer" in record["sentence"]
    assert main(["prove", "plain.py", "--output", "."]) == 2
    assert "'.' is there, and not empty" in capsys.readouterr().err
