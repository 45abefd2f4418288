"""The benchmarks run, with tiny counts: what they say is looked at by people, on a quiet machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from easymp.cuda.kernel import Kernel

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
    ("processes", "row"),
    [("1", "bf16 + clip"), pytest.param("2", "accumulation 4", marks=pytest.mark.slow)],
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


class Event:
    """Of torch.cuda, where a call has ended when it returns."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


class Recording(CompiledLauncher):
    """Keeps launches for a graph while it is captured."""

    graph: list[Any] | None = None

    def launch(self, kernel: Kernel, blocks: int, arguments: Sequence[int | float]) -> None:
        if self.graph is None:
            super().launch(kernel, blocks, arguments)
        else:
            self.graph.append((kernel, blocks, list(arguments)))


@pytest.mark.slow
def test_the_report_of_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All that is said of a GPU, with a CPU in its place: graphs are lists of launches, and torch.cuda's clock is this machine's."""
    launcher, kept = Recording(), []

    class Graph:
        def __init__(self) -> None:
            self.launches: list[Any] = []

        def replay(self) -> None:
            for launch in self.launches:
                launcher.launch(*launch)

    @contextmanager
    def capture(graph: Graph) -> Iterator[None]:
        launcher.graph = graph.launches
        try:
            yield
        finally:
            launcher.graph = None

    empty = torch.empty

    def private(*sizes: Any, **options: Any) -> torch.Tensor:
        made = empty(*sizes, **options)
        if launcher.graph is not None:
            kept.append(made)  # a graph's memory is its own
        return made

    monkeypatch.setattr(torch, "empty", private)
    card = SimpleNamespace(name="A card", total_memory=80 << 30, multi_processor_count=132)
    for name, stand_in in {
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": capture,
        "_sleep": lambda cycles: None,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device: (70 << 30, 80 << 30),
        "get_device_properties": lambda device: card,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setitem(
        sys.modules, "cupy", SimpleNamespace(__version__="14", __spec__=ModuleSpec("cupy", None))
    )
    benchmark = import_module("fused_step")
    monkeypatch.setattr(benchmark, "NEAR", {**benchmark.NEAR, "masters": (0.0, 0.0)})
    records = tmp_path / "records"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told = benchmark.gpu_report(["tiny"], 2, benchmark.Records(records), torch.device("cpu"), launcher)
    assert "(masters, tiny; " in told and "Left out: 'easymp, kernels' trains otherwise than" in told
    assert all(f"| tiny, {name} " in told for name in (benchmark.COPY, *benchmark.KINDS["ema"]))
    assert "| tiny, easymp, kernels, as a CUDA graph " in told
    assert (
        "- a CUDA graph of the step gives the same bits, over eight steps, one of which overflows: met"
        in told
    )
    assert "A card, 80 GiB, 132 multiprocessors" in told
    parts = [json.loads(line)["key"]["part"] for line in records.read_text().splitlines()]
    assert parts == ["replay", "gpu", "gpu", "gpu", "traces"]
    again = benchmark.Records(records).get(
        lambda: pytest.fail("measured anew"), part="gpu", size="tiny", kind="ema", rounds=2
    )
    assert again["failed"] == {}


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
