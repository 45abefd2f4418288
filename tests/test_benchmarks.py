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


def run(name: str, *arguments: str) -> str:
    """What a benchmark prints; with ``--out`` it is also in that file."""
    done = subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if "--out" in arguments:
        assert Path(arguments[-1]).read_text() == done.stdout
    return done.stdout


def test_call_path() -> None:
    told = run("call_path")
    assert "easymp, backward" in told and "easymp, micro-step" in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "rows"),
    [
        ("import_time --rounds 1", ["`easymp --help` does not import torch"]),
        ("overhead --rounds 2 --steps 4 --processes 1 --only", ["| bf16 + clip, 1 process"]),
        ("overhead --rounds 2 --steps 4 --processes 2 --only", ["| accumulation 4, 2 process"]),
        ("strategies --size tiny --rounds 2 --only single", ["| single, "]),
        ("strategies --size tiny --rounds 2 --only zero1", ["| zero1, "]),
        ("linear_cross_entropy --size tiny --rounds 1", ["| plain pair ", "| easymp "]),
        ("llm --rehearse", ["## tiny, 2 processes, bf16", "| by hand again ", "of Accelerate's tokens/s"]),
        ("fused_step --smoke", ["| tiny, clip, 1 thread ", "| tiny, loss scale and clip, 1 thread "]),
    ],
)
def test_each_tells_its_rows(words: str, rows: list[str], tmp_path: Path) -> None:
    arguments = words.split()
    if words.endswith("--only"):
        arguments.append(rows[0][2:].rpartition(",")[0])
    if arguments[0] != "import_time":
        arguments += ["--out", str(tmp_path / "told.md")]
    told = run(*arguments)
    assert all(row in told for row in rows)


@pytest.mark.slow
def test_memory_words() -> None:
    """Predicted bytes of gradients are those that are there; of activations, gradients of activations come on top."""
    rows = [row.split("|") for row in run("memory_words").splitlines() if row.startswith("| ") and "%" in row]
    off = {cells[1].strip(): float(cells[4].strip().rstrip("%")) for cells in rows}
    assert len(off) == 15
    assert all(-10 <= difference <= 30 for difference in off.values()), off


@pytest.mark.slow
def test_the_parts_of_make_gpu_run_without_one(tmp_path: Path) -> None:
    """All but those that have tests of their own above."""
    parts = ["fsdp", "checkpoint", "timeline"]
    told = run(
        "gpu", "--rehearse", "--folder", str(tmp_path), "--only", *parts, "--out", str(tmp_path / "gpu.md")
    )
    assert all(f"## {part}: " in told for part in parts)
    assert "ends with code" not in told
    assert told.count("- yes: ") + told.count("- NO: ") == 7


@pytest.mark.slow
def test_sharded_memory() -> None:
    cells = [row.split("|") for row in run("sharded_memory").splitlines() if row.startswith("| ")]
    rows = {row[1].strip(): row[2:] for row in cells}
    for precision in ("fp32", "bf16", "fp16"):
        assert rows[f"{precision}, easymp fsdp"] == rows[f"{precision}, fully_shard"]


@pytest.mark.slow
def test_all_of_the_fused_step_train_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark = import_module("fused_step")
    for kind, contenders in benchmark.KINDS.items():
        there = {name: contender for name, contender in contenders.items() if "CUDA" not in name}
        assert not benchmark.apart(there, kind, "tiny", torch.device("cpu"), CompiledLauncher())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "case", "said"),
    [
        (["easymp", "DCP"], "one", ["| plain write and read ", "| easymp ", "| DCP "]),
        (["DCP, async", "Accelerate"], "fsdp", ["| DCP, async ", "- Accelerate: left out: on CPUs it"]),
    ],
)
def test_checkpoint(tmp_path: Path, names: list[str], case: str, said: list[str]) -> None:
    where = ["--folder", str(tmp_path), "--out", str(tmp_path / "checkpoint.md")]
    told = run("checkpoint", "--size", "tiny", "--rounds", "1", "--only", *names, "--case", case, *where)
    assert os.listdir(tmp_path) == ["checkpoint.md"], "checkpoints are left on the disk"
    for words in ("CRC-32 is computed by", "| warm load, live, s |", *said):
        assert words in told
    assert "fails" not in told and "hangs" not in told
