"""The benchmarks run, with tiny counts: what they say is looked at by people, on a quiet machine."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from .cuda.compiled import CompiledLauncher

ROOT = Path(__file__).parent.parent
MISSING = [name for name in ("accelerate", "lightning_fabric") if find_spec(name) is None]

pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"optional packages are not installed: {' and '.join(MISSING)} (the extra 'bench')"
)


def run(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("processes", "row"), [("1", "bf16 + clip"), pytest.param("2", "accumulation 4", marks=pytest.mark.slow)]
)
def test_overhead(processes: str, row: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "overhead.md"
    arguments = ["--rounds", "2", "--steps", "4", "--processes", processes, "--only", row, "--out", str(out)]
    told = run("overhead", *arguments, monkeypatch=monkeypatch)
    assert f"| {row}, {processes} process" in told
    assert out.read_text() == told


@pytest.mark.slow
def test_sharded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    told = run("sharded_memory", monkeypatch=monkeypatch)
    rows = {
        row.split("|")[1].strip(): row.split("|")[2:] for row in told.splitlines() if row.startswith("| ")
    }
    for precision in ("fp32", "bf16", "fp16"):
        assert rows[f"{precision}, easymp fsdp"] == rows[f"{precision}, fully_shard"]


def test_import_time(monkeypatch: pytest.MonkeyPatch) -> None:
    told = run("import_time", "--rounds", "1", monkeypatch=monkeypatch)
    assert "`easymp --help` does not import torch" in told


def test_call_path(monkeypatch: pytest.MonkeyPatch) -> None:
    told = run("call_path", monkeypatch=monkeypatch)
    assert "easymp, backward" in told and "easymp, micro-step" in told


@pytest.mark.parametrize("only", ["single", pytest.param("zero1", marks=pytest.mark.slow)])
def test_strategies(only: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "strategies.md"
    told = run(
        "strategies",
        "--size",
        "tiny",
        "--rounds",
        "2",
        "--only",
        only,
        "--out",
        str(out),
        monkeypatch=monkeypatch,
    )
    assert f"| {only}, " in told
    assert out.read_text() == told


def test_fused_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "fused.md"
    told = run("fused_step", "--smoke", "--out", str(out), monkeypatch=monkeypatch)
    assert "| tiny, clip, 1 thread " in told and "| tiny, loss scale and clip, 1 thread " in told
    assert out.read_text() == told


@pytest.mark.slow
def test_all_of_the_fused_step_train_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark = import_module("fused_step")
    for kind, contenders in benchmark.KINDS.items():
        there = {name: contender for name, contender in contenders.items() if "CUDA" not in name}
        assert not benchmark.apart(there, kind, "tiny", torch.device("cpu"), CompiledLauncher())


def checkpoints(*arguments: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    out = folder / "checkpoint.md"
    asked = [
        "--size",
        "tiny",
        "--rounds",
        "1",
        "--only",
        *arguments,
        "--folder",
        str(folder),
        "--out",
        str(out),
    ]
    told = run("checkpoint", *asked, monkeypatch=monkeypatch)
    assert out.read_text() == told
    assert os.listdir(folder) == ["checkpoint.md"], "checkpoints are left on the disk"
    assert "CRC-32 is computed by" in told and "| warm load, live, s |" in told
    return told


@pytest.mark.slow
def test_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = checkpoints("easymp", "DCP", "--case", "one", folder=tmp_path, monkeypatch=monkeypatch)
    assert all(f"| {name} " in told for name in ("plain write and read", "easymp", "DCP"))
    assert "fails" not in told and "hangs" not in told


@pytest.mark.slow
def test_checkpoints_of_two_processes_beside_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = checkpoints("DCP, async", "Accelerate", "--case", "fsdp", folder=tmp_path, monkeypatch=monkeypatch)
    assert "| DCP, async " in told and "fails" not in told and "hangs" not in told
    assert "- Accelerate: left out: on CPUs it passes over" in told
