"""``easymp rehearse``: a script's start and two updates as ranks of a world that does not exist."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from easymp.cli import main

# Prints, where it really runs, what the last rank holds and sends in the second update, counted by itself; the peak by
# malloc's count, where it has one, after each operation. Copies that gloo makes inside of a collective are gone by
# then.
SCRIPT = """
import ctypes, json, sys
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from easymp import Accelerator, Settings

FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
Heap = type("Heap", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in FIELDS.split()]})
libc = ctypes.CDLL(None)
if hasattr(libc, "mallinfo2"):
    libc.mallinfo2.restype = Heap

def level():
    "Bytes that malloc has given to this process."
    heap = libc.mallinfo2()
    return heap.uordblks + heap.hblkhd

class Sent(TorchDispatchMode):
    total = most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any("DTensor" in kind.__name__ for kind in types):
            return NotImplemented
        moves = any(word in func.__name__ for word in ("all", "reduce_scatter"))
        if moves and func.namespace in ("c10d", "_c10d_functional"):
            given = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
            if "_reduce_scatter_base_" in func.__name__:
                given = args[1:2]
            flat = [t for one in given for t in (one if isinstance(one, (list, tuple)) else [one])]
            gathered = args[1] if "functional.all_gather" in str(func) else 1
            Sent.total += gathered * sum(t.nbytes for t in flat)
        out = func(*args, **(kwargs or {}))
        Sent.most = max(Sent.most, level()) if real else 0
        return out

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

real = sys.argv[1:] == ["real"] and hasattr(libc, "mallinfo2")
rare = Settings(replica_check=0, debug=False)
acc = Accelerator(seed=0, log_with="none", settings=rare, cpu=sys.argv[1:] == ["real"] or None)
model = nn.Sequential(nn.Linear(32, 256), *(Block() for _ in range(4)), nn.Linear(256, 10))
data = torch.utils.data.TensorDataset(torch.randn(512, 32), torch.arange(512) % 10)
loader = torch.utils.data.DataLoader(data, batch_size=64)
model, optimizer, loader = acc.prepare(model, torch.optim.AdamW(model.parameters(), fused=False), loader)

here = lambda tensors: sum(getattr(t, "_local_tensor", t).nbytes for t in tensors if not t.is_meta)

def update(x, y):
    loss = nn.functional.cross_entropy(model(x), y)
    acc.backward(loss)
    held = [p for g in optimizer.param_groups for p in g["params"]]
    grads = here(p.grad for p in held if p.grad is not None)
    optimizer.step()
    states = here(t for s in optimizer.state.values() for t in s.values() if t.numel() > 1)
    kinds = {"weights": here(acc.unwrap_model(model).parameters()), "gradients": grads, "states": states}
    before = level() if real else 0
    optimizer.zero_grad()
    float(loss)
    return kinds, before

for x, y in loader:
    if optimizer.updates == 0:
        kinds, before = update(x, y)
        continue
    with Sent():
        update(x, y)
    break
if acc.process_index == acc.num_processes - 1:
    peak = {"peak": sum(kinds.values()) + Sent.most - before} if real else {}
    print(json.dumps({**kinds, **peak, "sent": Sent.total}), flush=True)
acc.end_training()
"""
START = """
import torch
from torch import nn
from easymp import Accelerator

acc = Accelerator()
"""
PLAN = {"*.q": "colwise", "*.k": "colwise", "*.v": "colwise", "*.o": "rowwise"}
HANG = """
model = nn.Linear(64, 64)
loader = torch.utils.data.DataLoader(torch.randn(4096, 64), batch_size=8)
model, optimizer, loader = acc.prepare(model, torch.optim.SGD(model.parameters()), loader)
for x in loader:
    loss = model(x).square().mean()
    acc.backward(loss)
    if acc.is_main_process:
        acc.reduce(loss)  # the other ranks do not come
    optimizer.step()
    optimizer.zero_grad()
"""
HEADS = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(48, 48) for _ in range(4))

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (-1, 16)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

model = nn.Sequential(Attention(), Attention())
loader = torch.utils.data.DataLoader(torch.randn(4096, 8, 48), batch_size=8)
model, optimizer, loader = acc.prepare(model, torch.optim.SGD(model.parameters()), loader)
for x in loader:
    acc.backward(model(x).square().mean())
    optimizer.step()
"""
# Two models, two optimizers, on the meta device: 28 GB of weights in fp32.
GAN = """
with torch.device("meta"):
    make = nn.Sequential(nn.Linear(64, 70_000), nn.ReLU(), nn.Linear(70_000, 50_000), nn.Linear(50_000, 64))
    judge = nn.Sequential(nn.Linear(64, 70_000), nn.ReLU(), nn.Linear(70_000, 50_000), nn.Linear(50_000, 1))
first, second = torch.optim.Adam(make.parameters()), torch.optim.Adam(judge.parameters())
loader = torch.utils.data.DataLoader(torch.randn(4096, 64), batch_size=16)
make, judge, first, second, loader = acc.prepare(make, judge, first, second, loader)
for real in loader:
    noise = torch.randn(len(real), 64, device=acc.device)
    fake = make(noise)
    acc.backward(judge(fake.detach()).mean() - judge(real).mean())
    second.step()
    second.zero_grad()
    acc.backward(-judge(fake).mean())
    first.step()
    first.zero_grad()
    second.zero_grad()
    acc.log({"loss": float(fake.mean())})
"""


def rehearse(
    capsys: pytest.CaptureFixture[str], folder: Path, text: str, *arguments: str
) -> tuple[int, dict[str, Any]]:
    """The exit code and what ``--json`` prints."""
    (folder / "train.py").write_text(text)
    code = main(["rehearse", str(folder / "train.py"), "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def agrees(capsys: pytest.CaptureFixture[str], folder: Path, strategy: str, processes: int, *sets: str) -> None:
    """Compare the last rank's bytes of a rehearsal with those that a real run counts."""
    settings = [argument for one in (f"strategy={strategy}", *sets) for argument in ("--set", one)]
    (folder / "train.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "easymp", "launch", "--processes", str(processes), *settings]
    real = subprocess.run([*launch, "train.py", "real"], cwd=folder, capture_output=True, text=True, check=False)
    assert real.returncode == 0, real.stdout + real.stderr
    counted = json.loads(next(line for line in real.stdout.splitlines() if line.startswith("{")))
    if "mixed_precision=bf16" in sets:
        counted.pop("peak", None)  # the CPU's kernels keep copies of their weights in bf16
    machine = ["--for", f"{processes}xcpu-64GB", "--ranks", str(processes - 1)]
    code, record = rehearse(capsys, folder, SCRIPT, *machine, *settings)
    assert code == 0, record["sentence"]
    (rank,) = record["ranks"]
    rows = [row for row in rank["collectives"] if row["when"] == "update"]
    sent = sum(row["bytes"] for row in rows if row["kind"] not in ("send", "receive", "broadcast"))
    counted_here = {**rank["bytes"], "peak": rank["peak"], "sent": sent}
    assert {name: counted_here[name] for name in counted} == pytest.approx(counted, rel=0.05)
    assert rank["samples"] == 64 and rank["updates"] == 2
    if strategy == "pipeline":  # the other stages are let go of
        assert rank["peak"] < 1.5 * sum(rank["bytes"].values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks", "sets"),
    [
        ("ddp", 2, ["mixed_precision=no"]),
        ("zero1", 2, ["mixed_precision=no"]),
        ("fsdp", 2, ["mixed_precision=no"]),
        ("fsdp", 4, ["mixed_precision=bf16"]),
        ("hsdp", 4, ["mixed_precision=no", "strategy_options.shard_size=2"]),
        ("tensor_parallel", 4, ["mixed_precision=no", "strategy_options.size=2"]),
        ("pipeline", 4, ["mixed_precision=no"]),
    ],
)
def test_bytes_are_those_of_real_ranks(tmp_path: Path, capsys: Any, strategy: str, ranks: int, sets: list[str]) -> None:
    agrees(capsys, tmp_path, strategy, ranks, *sets)


@pytest.mark.slow
def test_what_would_fail_there(tmp_path: Path, capsys: Any) -> None:
    node = ("--for", "8xH100", "--processes", "64")
    code, record = rehearse(capsys, tmp_path, START + HANG, *node, "--strategy", "ddp", "--ranks", "0,63")
    assert code == 1 and "would wait for each other for good: rank 0 comes to call of reduce" in record["sentence"]
    assert "train.py:15" in record["sentence"]
    on_host = START + HANG.replace(".square().mean()", ".square().mean() + torch.ones(1)")
    code, record = rehearse(capsys, tmp_path, on_host, *node, "--ranks", "0")
    assert code == 1 and "train.py:12 computes with a tensor on the CPU and one on the device" in record["sentence"]
    split = START.replace("()", f"(strategy='tensor_parallel', strategy_options={{'plan': {PLAN}}})")
    code, record = rehearse(capsys, tmp_path, split + HEADS, "--for", "8xH100", "--ranks", "0")
    assert code == 1 and "unflatten" in record["sentence"], record["sentence"]  # 3 heads among 8 ranks
    code, record = rehearse(capsys, tmp_path, split + HEADS, "--for", "3xH100", "--ranks", "0")
    assert code == 0, record["sentence"]
    gan = (START + GAN, *node, "--ranks", "0")
    code, record = rehearse(capsys, tmp_path, *gan, "--strategy", "ddp")
    assert code == 1 and "out of memory: rank 0 needs" in record["sentence"]
    code, record = rehearse(capsys, tmp_path, *gan, "--strategy", "fsdp", "--global-batch", "4096")
    assert code == 1 and "reads 1024 samples over all ranks, and 4096 are meant" in record["sentence"]


@pytest.mark.slow
def test_it_says_what_a_rank_would_do(tmp_path: Path, capsys: Any) -> None:
    node = ("--for", "8xH100", "--processes", "64", "--strategy", "fsdp", "--global-batch", "1024")
    code, record = rehearse(capsys, tmp_path, START + GAN, *node, "--ranks", "0,63")
    assert (code, record["verdict"], record["nodes"]) == (0, "it would run", 8), record["sentence"]
    first, last = record["ranks"]
    layers = [pair for last in (64, 1) for pair in pairwise([64, 70_000, 50_000, last])]
    parameters = sum(a * b + b for a, b in layers)
    assert first["bytes"]["weights"] == pytest.approx(4 * parameters / 64, rel=0.05)
    assert first["bytes"]["states"] == pytest.approx(2 * first["bytes"]["weights"], rel=0.05)
    assert first["samples"] == 16 and first["waits"]["train.py:24"] == 1  # float(fake.mean())
    assert first["plan"]["precision"]["value"] == "bf16" and first["peak"] > sum(first["bytes"].values()) / 2
    assert {row["kind"] for row in last["collectives"] if row["when"] == "update"} >= {"all_gather", "reduce_scatter"}
    (tmp_path / "train.py").write_text(START + GAN)
    assert main(["rehearse", str(tmp_path / "train.py"), *node[:4], "--ranks", "0"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    # auto says what was compared
    assert "ddp needs" in output and "fsdp needs" in output and "candidate fsdp" in output
    assert "It would run on 64 ranks." in output and "native bf16 on sm_90" in output and "reduce_scatter" in output


@pytest.mark.slow
def test_processes_of_a_cpu(tmp_path: Path, capsys: Any, on_machine: Any) -> None:
    on_machine("laptop CPU")
    code, record = rehearse(capsys, tmp_path, START + HANG, "--processes", "2", "--ranks", "1", "--strategy", "ddp")
    assert (code, record["nodes"]) == (0, 1) and record["ranks"][0]["memory"] > 1 << 30, record["sentence"]
    on_cpu = START.replace("()", "(cpu=True)") + HANG
    code, record = rehearse(capsys, tmp_path, on_cpu, "--for", "8xH100", "--ranks", "1")
    assert code == 2 and "the plan trains on cpu, and --for 8xH100 does not say its memory" in record["sentence"]


OF_ACCELERATE = """
import torch
from easymp.compat.accelerate import Accelerator

acc = Accelerator(cpu=True)
model = torch.nn.Linear(4, 2)
model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
for _ in range(3):
    acc.backward(model(torch.ones(3, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
    if acc.is_main_process:
        acc.save_state("checkpoint")
acc.end_training()
"""


@pytest.mark.slow
def test_a_script_of_accelerate(tmp_path: Path, capsys: Any) -> None:
    code, record = rehearse(capsys, tmp_path, OF_ACCELERATE, "--processes", "2", "--ranks", "0,1")
    assert (code, record["verdict"]) == (0, "it would run"), record["sentence"]
    assert not (tmp_path / "checkpoint").exists()


def test_wrong_words(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "train.py").write_text("")
    for arguments, sentence in (
        (["--processes", "64", "--nodes", "3", "--for", "8xH100"], "--processes 64 on 3 nodes of 8 devices"),
        (["--processes", "64", "--for", "8xH100", "--ranks", "64"], "--ranks 64: write numbers from 0 to 63"),
        (["--strategy", "fdsp"], "fsdp"),
    ):
        assert main(["rehearse", str(tmp_path / "train.py"), *arguments]) == 2
        assert sentence in capsys.readouterr().err


GPT = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from easymp import Accelerator

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))

acc = Accelerator(cpu=True, mixed_precision="fp32", log_with="none")
model = nn.Sequential(nn.Embedding(2000, 64), *(Block() for _ in range(3)), nn.Linear(64, 2000))
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randint(2000, (8, 128)))
model, optimizer, loader = acc.prepare(model, optimizer, DataLoader(data, batch_size=8))
for (x,) in loader:  # one update
    loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
    acc.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_the_largest_tensors_at_the_peak_are_named_with_the_word_that_removes_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("gpt.py").write_text(GPT)

    def rehearse(*arguments: str) -> dict[str, Any]:
        assert main(["rehearse", "gpt.py", "--json", *arguments]) == 0
        return json.loads(capsys.readouterr().out)["ranks"][0]

    rank = rehearse()
    logits = 8 * 128 * 2000 * 4
    line = next(i for i, text in enumerate(GPT.splitlines(), 1) if "cross_entropy" in text)
    rows = [row for row in rank["largest"] if row["bytes"] == logits]
    assert len(rank["largest"]) == 10 and len(rows) >= 2 and rank["samples"] == 8
    assert {row["line"] for row in rows} == {f"gpt.py:{line}"}
    assert {row["remedy"] for row in rows} == {"easymp.nn.linear_cross_entropy"}
    blocks = [row for row in rank["largest"] if row["of"].split(".")[0] in ("1", "2", "3")]
    assert blocks and all(row["remedy"] == "activation_checkpointing='blocks'" for row in blocks)
    recomputed = rehearse("--set", "activation_checkpointing=blocks")
    assert (
        recomputed["peak"]
        <= rank["peak"] - sum(row["saves"] for row in blocks if row["bytes"] == 8 * 128 * 256 * 4) / 2
    )
