"""acc.profile() in one process: steps, marks, traces, and what scripts of torch and Accelerate do with it."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from easymp import Accelerator, CompileOptions, ProfileKwargs, RefusedError, SettingError, StepError

PREFIX = "easymp: "  # of marks in a trace


class Script:
    """A small training."""

    def __init__(self, folder: Path, accumulation: int = 1, **options: Any) -> None:
        options = {"mixed_precision": "no", "gradient_accumulation_steps": accumulation, **options}
        self.acc = Accelerator(cpu=True, project_dir=folder, **options)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        loader = DataLoader(TensorDataset(torch.randn(64, 8)), 4)
        self.model, self.optimizer, self.loader = self.acc.prepare(model, torch.optim.AdamW(model.parameters()), loader)

    def step(self, x: torch.Tensor) -> None:
        with self.acc.accumulate(self.model):
            self.acc.backward(self.model(x).square().mean())
            self.acc.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def run(self, batches: int) -> None:
        for i, (x,) in enumerate(self.loader, 1):
            self.step(x)
            if i == batches:
                break


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    script = Script(tmp_path)
    yield script
    script.acc.close()


def names(prof: Any) -> dict[str, int]:
    """Marks in the recording, and how often."""
    return {
        e.key.removeprefix(PREFIX): e.count for e in prof.key_averages() if e.key.startswith((PREFIX, "ProfilerStep"))
    }


def test_without_options_three_steps_after_two_count(script: Script) -> None:
    with script.acc.profile() as prof:
        script.run(9)
    assert isinstance(prof, torch.profiler.profile)
    assert names(prof) == {"ProfilerStep*": 5, "data wait": 5, "forward": 5, "backward": 5, "optimizer": 15}
    assert len(prof.breakdown.steps) == 3
    assert set(prof.breakdown.time) == {"data wait", "forward", "loss", "backward", "optimizer", "other"}
    assert set(prof.breakdown.peak) == set(prof.breakdown.time)
    text, (path,) = prof.summary(), prof.traces
    assert text.startswith("profile of cpu, 3 steps of ")
    assert text.endswith(f"\ntrace: {path}")
    assert all(len(line) <= 80 for line in text.splitlines()[:-1])
    trace = json.loads(path.read_text())  # Chrome's format
    complete = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert all({"name", "ts", "dur", "pid", "tid"} <= set(e) for e in complete)
    assert {"easymp: forward", "ProfilerStep#0", "ProfilerStep#4"} <= {e["name"] for e in complete}
    assert [p.name for p in path.parent.iterdir()] == ["rank0-001.json"]
    prof.export_chrome_trace(str(path.with_name("copy.json")))  # torch writes each but once
    assert path.with_name("copy.json").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(("batches", "steps"), [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (6, 3)])
def test_short_runs_count_what_there_was(script: Script, batches: int, steps: int) -> None:
    """A step is complete when the next batch is asked for: a loop that breaks off leaves its last one open."""
    with script.acc.profile() as prof:
        script.run(batches) if batches else script.step(torch.randn(4, 8))
    assert len(prof.breakdown.steps) == steps
    assert ("no step in it was complete" in prof.summary()) == (batches < 2)
    assert names(prof)["backward"] >= 1
    assert len(prof.traces) == 1


def test_a_step_is_an_update_and_holds_nested_loops(tmp_path: Path) -> None:
    script = Script(tmp_path, accumulation=4)
    test_loader = script.acc.prepare(DataLoader(TensorDataset(torch.randn(8, 8)), 4))
    with script.acc.profile(ProfileKwargs()) as prof:
        for i, (x,) in enumerate(script.loader, 1):
            script.step(x)
            if i % 8 == 0:
                with torch.no_grad():
                    for (y,) in test_loader:
                        script.model(y)
    script.acc.close()
    assert len(prof.breakdown.steps) == 4
    assert prof.breakdown.time["forward, no grad"] > 0
    assert names(prof)["forward"] == 16
    assert names(prof)["forward, no grad"] == 4


def test_steps_by_hand_are_the_only_ones(script: Script) -> None:
    with script.acc.profile(ProfileKwargs()) as prof:
        script.run(99)
    assert len(prof.breakdown.steps) == 16  # the last batch ends its step
    with script.acc.profile(ProfileKwargs()) as prof:
        for _, (x,) in zip(range(6), script.loader):
            script.step(x)
            prof.step()
    assert len(prof.breakdown.steps) == 6


def test_with_accelerates_programs(tmp_path: Path) -> None:
    tables = []

    def on_trace_ready(prof: Any) -> None:
        prof.export_chrome_trace(str(tmp_path / f"copy-{prof.step_num}.json.gz"))
        tables.append(prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=3))

    schedule = {"wait": 1, "warmup": 1, "active": 2, "repeat": 2, "skip_first": 1}
    traces = tmp_path / "traces"
    options = {"schedule_option": schedule, "on_trace_ready": on_trace_ready, "output_trace_dir": traces}
    script = Script(tmp_path)
    with script.acc.profile(ProfileKwargs(activities=["cpu"], **options)) as prof:
        for _ in range(12):
            script.step(torch.randn(4, 8))
            prof.step()
    with script.acc.profile(ProfileKwargs(with_flops=True)) as inference, torch.no_grad():
        script.model(torch.randn(2, 8))
    script.acc.close()
    assert (len(tables), len(prof.breakdown.steps)) == (2, 4)
    assert prof.traces == [traces / "rank0-001.json", traces / "rank0-002.json"]
    copied = gzip.decompress((tmp_path / "copy-5.json.gz").read_bytes())
    assert json.loads(copied) == json.loads(prof.traces[0].read_bytes())
    assert not prof.breakdown.peak  # profile_memory was not asked for
    assert inference.traces == [tmp_path / "profile" / "rank0-001.json"]
    assert "forward, no grad" in inference.summary()


def test_nothing_is_left_behind(script: Script) -> None:
    acc, optimizer = script.acc, script.optimizer
    script.run(1)
    objects = (acc, optimizer, script.model)
    attributes = [set(vars(owner)) for owner in objects]

    def fail() -> None:
        script.run(1)
        assert "step" in optimizer.__dict__
        with pytest.raises(StepError, match="open already"):
            acc.profile().start()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), acc.profile() as prof:
        fail()
    assert [set(vars(owner)) for owner in objects] == attributes
    assert acc._parts.get("profile") is None
    assert "1 step" in prof.summary()
    with acc.profile() as prof:  # and again; once all is recorded the rest of the block costs nothing
        for i, (x,) in enumerate(script.loader):
            script.step(x)
            assert ("step" in optimizer.__dict__) == (i < 5)
    calls = []
    with acc.profile():
        inner = optimizer.step
        optimizer.step = lambda *a: (calls.append(1), inner(*a))[1]  # who wraps it meanwhile keeps it
    script.run(1)
    assert calls == [1]


class Slow(Dataset):
    """Slower than the rest of a step on a busy machine."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.05)
        return torch.ones(8)


def test_a_loader_that_makes_the_step_wait_is_named(script: Script) -> None:
    loader = script.acc.prepare(DataLoader(Slow(), 2))
    with script.acc.profile() as prof:
        for x in loader:
            script.step(x)
    assert prof.breakdown.phase_per_step("data wait") >= 90e6
    assert "of the step is data wait." in prof.summary()
    assert re.search(r"The loader makes the step wait [0-9.]+ ms: num_workers=2 or more", prof.summary())


def test_training_is_the_same_with_a_profile(tmp_path: Path) -> None:
    weights = []
    for profile in (lambda acc: nullcontext(), Accelerator.profile):
        torch.manual_seed(0)
        script = Script(tmp_path)
        with profile(script.acc):
            script.run(9)
        weights.append([p.detach().clone() for p in script.model.parameters()])
        script.acc.close()
    assert all(torch.equal(a, b) for a, b in zip(*weights))


@pytest.mark.slow
def test_a_compiled_model_is_marked_and_not_compiled_again(tmp_path: Path) -> None:
    compilations = []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(graph)
        return graph.forward

    compiling = CompileOptions(backend=backend)
    with Accelerator(cpu=True, mixed_precision="no", project_dir=tmp_path, compile=compiling) as acc:
        model = acc.prepare(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
        acc.backward(model(torch.randn(2, 8)).sum())
        compiled, count = model._compiled_call_impl, len(compilations)
        with acc.profile() as prof:
            for _ in range(6):
                acc.backward(model(torch.randn(2, 8)).sum())
                prof.step()
        assert names(prof)["forward"] == 5
        assert len(compilations) == count
        assert model._compiled_call_impl is compiled


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activities": ["cpus"]}, "activities.*'cpus' is none of .* did you mean 'cpu'"),
        ({"schedule_option": {"wait": 1, "warmup": 1}}, "does not suit torch.*'active'"),
        ({"schedule_option": {"activ": 1}}, "does not suit torch.*'activ'"),
        ({"on_trace_ready": "print"}, "on_trace_ready.*function"),
    ],
)
def test_wrong_options_say_what_to_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        ProfileKwargs(**options)


def test_what_cannot_be_recorded_or_written_is_said_at_once(script: Script, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="none of the activities xpu can be recorded here: there are cpu"):
        script.acc.profile(ProfileKwargs(activities=["xpu"]))
    (tmp_path / "file").touch()
    prof = script.acc.profile(ProfileKwargs(output_trace_dir=tmp_path / "file"))
    with pytest.raises(SettingError, match=r"traces cannot be written to .*file: .*output_trace_dir"):
        prof.start()
    assert script.acc._parts.get("profile") is None
    with Accelerator(cpu=True, project_dir="memory://runs") as acc:
        with pytest.raises(SettingError, match="traces are local files, and project_dir='memory://runs'"):
            acc.profile().start()


def test_a_run_on_the_cpu_wakes_no_gpu(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although torch would record one that is here."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pytest.fail("initialises CUDA"))
    profile = script.acc.profile()
    profile.use_device = "cuda"
    with profile:
        torch.ones(2) + 1
    assert profile.breakdown.steps
