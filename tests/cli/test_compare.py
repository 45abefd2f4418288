"""``easymp compare``: its words, its files, its exit codes, and real runs."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from easymp import Settings, resolve
from easymp.cli import compare, harness, main
from easymp.cli.compare.runs import Variant
from easymp.cli.harness import FAILURE, FINISHED, INTERRUPTED, LATE, End

from ..examples.run import environment
from .runs import MACHINE, TINY, comparison, run

FP32, BF16 = Variant("fp32"), Variant("bf16")
EVIL = "<script>alert(1)</script>\"'&$\\frac{1}"


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return "train.py"


class Call(NamedTuple):
    """The arguments of a run, and the settings in the environment meanwhile."""

    command: list[str]
    folder: Path
    settings: dict[str, str]
    environment: Settings


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The runs that are started. bf16 fails, O1 is interrupted."""
    calls: list[Call] = []

    def run_once(head: str, command: list[str], folder: Path, settings: dict[str, str], timeout: Any) -> End:
        folder.mkdir(parents=True)
        calls.append(Call(command, folder, settings, resolve()))
        if settings.get("mixed_precision") == "O1":
            return End(INTERRUPTED, "stopped by a signal", 1e9, 3.0)
        failed = settings.get("mixed_precision") == "bf16"
        return run(FP32, None if failed else 10, why="RefusedError: no\x1b[2J").end

    record = run(FP32, 10, values={"loss": [2, 1]}).record
    monkeypatch.setattr(compare, "run_once", run_once)
    monkeypatch.setattr(compare, "read", lambda folder: record if "fp32" in folder.name else None)
    monkeypatch.setattr("easymp.cli.terminal.find_spec", lambda name: None)
    return calls


@pytest.mark.parametrize(
    ("arguments", "seeds", "timeout"),
    [
        ("train.py --precision fp32,bf16 --repeats 2 --output out", [None] * 4, 120.0),
        ("--precision fp32,bf16 --output out --set timeout=9 train.py --repeats 2 --seed 5", ["5", "5", "6", "6"], 9.0),
    ],
)
def test_options_stand_before_and_after_the_script(arguments, seeds, timeout, script, calls, tmp_path):
    assert main(["compare", *arguments.split(), *"-- --epochs 2 --repeats 9 -- x".split()]) == 1  # bf16 fails
    assert calls[0].command[2:] == ["easymp", "launch", "train.py", "--epochs", "2", "--repeats", "9", "--", "x"]
    assert [call.settings["mixed_precision"] for call in calls] == ["fp32", "bf16"] * 2
    names = ["1-fp32-1", "2-bf16-1", "1-fp32-2", "2-bf16-2"]
    assert [call.folder for call in calls] == [tmp_path / "out" / "runs" / name for name in names]
    assert [call.settings.get("seed") for call in calls] == seeds
    assert [call.environment.timeout for call in calls] == [timeout] * 4
    assert resolve().timeout == 120.0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("", "usage: easymp compare"),
        ("train.py --epochs 3", "the script's own arguments follow --"),
        ("train.py --processes 1,x", "is not a whole number"),
        ("train.py --vary seed", "is not NAME=A,B"),
        ("train.py --vary sead=1,2", "did you mean 'seed'"),
        ("train.py --vary seed=1,-2", "below the smallest"),
        ("train.py --vary precision=fp32 --precision bf16", "mixed_precision is given twice"),
        ("train.py --vary seed=1,2 --set seed=3", "seed is given twice"),
        ("train.py --vary seed=1,2 --seed 3", "leave one of them out"),
        ("train.py --repeats 0", "not a whole number"),
        ("train.py --prec fp32", "usage"),
        ("train.py --precision bf61", "did you mean 'bf16'"),
        ("train.py --vary project_dir=a,b", "cannot be varied"),
        ("train.py --vary batch=1,2 -- --batch 3", "among the script's own arguments"),
        (". --seed 1", "leave out what would start new ones"),
        (". nowhere", ". has no recorded run: EASYMP_RECORD=. python train.py records one"),
        ("train.py --strategy dpp", "did you mean 'ddp'"),
        ("train.py --precision fp32,fp32", "--repeats"),
        ("train.py --output .", "is there, and not empty"),
    ],
)
def test_wrong_usage(arguments, sentence, script, calls, capsys):
    assert main(["compare", *arguments.split()]) == 2
    assert sentence in capsys.readouterr().err
    assert not calls


def test_the_table_the_reason_of_a_failure_and_an_interruption(script, calls, capsys):
    main(["compare", script, "--precision", "fp32,bf16", "--output", "out"])
    output, err = capsys.readouterr()
    lines = output.splitlines()
    assert lines[0] == "Only fp32 finished with at least two updates, so there is nothing to compare."
    assert lines[2].split() == ["time", "memory", "loss", "start-up"]
    assert lines[3].split() == ["fp32", "10.0", "s", "1.0", "GiB", "1", "3", "s"]
    assert lines[4].split() == ["bf16", "–", "–", "–", "–"]
    assert lines[5] == "bf16 failed: RefusedError: no\\x1b[2J" and "\x1b" not in output
    assert lines[-1] == "wrote out/compare.json"
    assert err.splitlines()[0] == "about 14.0 s left"
    assert "matplotlib is not installed: pip install 'easymp[report]'" in " ".join(err.split())
    assert main(["compare", script, "--precision", "fp32,O1,O2", "--output", "two"]) == 130
    output = capsys.readouterr().out
    assert "O1 interrupted: stopped by a signal" in output and "O2" not in output


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("--precision fp32 --strategy ddp,fsdp --processes 2", "ddp fsdp"),
        ("--precision fp32,O2 --strategy ddp,fsdp", "fp32-ddp fp32-fsdp O2-ddp O2-fsdp"),
        ("--strategy ddp --processes 1,2", "1-process 2-processes"),
        ("--strategy ddp", "ddp"),
        ("--vary compile=,model --vary seed=3", "compile-as-it-is compile-model"),
        ("--vary precision=fp32 --vary gradient_accumulation_steps=1,4", "accumulation-1 accumulation-4"),
        ("--strategy fsdp --vary strategy_options.cpu_offload=false,true", "cpu-offload-false cpu-offload-true"),
        ("", "as-it-is"),
    ],
)  # fmt: skip
def test_plans_are_named_by_their_differences(arguments, names, script, calls):
    main(["compare", script, "--output", "out", *arguments.split()])
    assert [re.sub(r"^\d+-(.*)-1$", r"\1", call.folder.name) for call in calls] == names.split()


def test_varied_values_reach_the_settings_and_the_script(script, calls):
    varied = "--vary batch=8,16 --vary compile=,model --vary 'log_with=\"jsonl,console\"' -- --batch-size={batch} x"
    main(["compare", script, "--output", "out", *shlex.split(varied)])
    log = {"log_with": "jsonl,console"}
    assert [call.settings for call in calls] == [log, {"compile": "model", **log}] * 2
    assert [call.command[-2:] for call in calls] == [[f"--batch-size={n}", "x"] for n in (8, 8, 16, 16)]


def test_names_are_drawn_as_they_are(fonts: None, tmp_path: Path) -> None:
    values = {"loss": [2.0**-i for i in range(100)], EVIL: [0.1, 0.2]}
    plans = ((FP32, 10), (Variant(EVIL), 6))
    finished = [run(plan, seconds + i, i, values=values) for plan, seconds in plans for i in (1, 2)]
    failed = run(Variant("O1"), None, why=EVIL)
    hostile = comparison(*finished, failed, metrics=("loss", EVIL), script=f"/x/{EVIL}.py", folder=tmp_path)
    files, problem = compare.write(hostile)
    assert problem == ""
    assert [path.name for path in files] == ["compare.json", "compare.png"]
    assert files[1].read_bytes().startswith(b"\x89PNG")
    titles = [panel.title for panel in compare.make_panels(hostile)]
    assert titles[:2] == ["loss by updates", "loss by seconds"]
    plan = json.loads(files[0].read_text())["plans"][1]
    assert (plan["name"], plan["seconds"]["median"]) == (EVIL, 7.5)


def test_json_has_no_nan_and_failed_runs_no_plots(fonts: None, tmp_path: Path) -> None:
    values = {"loss": [1.0, float("nan"), 0.5]}
    finished = comparison(run(FP32, 2, values=values), run(BF16, 1, values=values), folder=tmp_path)
    record = json.loads(compare.write(finished)[0][0].read_text())
    assert [plan["seconds"]["median"] for plan in record["plans"]] == [2, 1]
    assert record["plans"][0]["runs"][0]["record"]["curves"]["loss"][1][2] is None
    assert record["verdict"]["sentence"] == finished.verdict.sentence
    files, _ = compare.write(comparison(run(FP32, None, why="no"), folder=tmp_path))
    assert [path.name for path in files] == ["compare.json"]


LEAVES_A_CHILD = """
import signal, subprocess, sys
signal.signal(15, signal.SIG_IGN)
subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"])
"""


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        ("import sys; print('last words'); sys.exit(3)", FAILURE, "last words"),
        ("import os; os.abort()", FAILURE, "exit code -6"),
        ("print('rank 1 of 2 failed first: ValueError: no'); raise SystemExit(1)", FAILURE, "ValueError: no"),
        (LEAVES_A_CHILD, LATE, "stopped after 0.3 seconds (--timeout)"),
        ("import os; print(os.environ['EASYMP_OVERRIDE'], os.environ['EASYMP_RECORD'])", FINISHED, ""),
    ],
)
def test_ends(code: str, status: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "GRACE", 0.3)
    monkeypatch.setenv("EASYMP_OVERRIDE", "timeout=9")
    children = set(psutil.Process().children(recursive=True))
    folder, timeout = tmp_path / "a b", 0.3 if status == LATE else 60
    end = harness.run("1/1", [sys.executable, "-c", code], folder, {"strategy": "ddp"}, timeout)
    assert (end.status, end.why) == (status, reason)
    assert set(psutil.Process().children(recursive=True)) <= children
    if status == FINISHED:
        expected = f"timeout=9 strategy=ddp project_dir='{folder}/project' {folder}\n"
        assert (folder / "output.txt").read_text() == expected


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_plans_that_finish_are_refused_and_are_interrupted(tmp_path: Path) -> None:
    """By SIGTERM; Ctrl-C's SIGINT takes the same way."""
    (tmp_path / "tiny.py").write_text(TINY)
    arguments = "compare tiny.py --vary precision=fp32,fp8,O3 --vary rows=64 --processes 2 --output out -- {rows} x"
    command, pipe = [sys.executable, "-m", "easymp", *arguments.split()], subprocess.PIPE
    folder = tmp_path / "out"
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=pipe, stderr=pipe, text=True) as process:
        try:
            while process.poll() is None and not (folder / "runs" / "3-O3-1" / "rank-0.jsonl").exists():
                time.sleep(0.05)
            ranks = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            output, err = process.communicate(timeout=110)
        finally:
            process.terminate()  # a hang fails the test, and leaves nothing that runs
    assert process.returncode == 130, err
    assert output.splitlines()[3].startswith("  fp32 ")
    assert "O3 interrupted: stopped by a signal" in output
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive
    plans = {p["name"]: p["runs"][0] for p in json.loads((folder / "compare.json").read_text())["plans"]}
    statuses = {name: run["status"] for name, run in plans.items()}
    assert statuses == {"fp32": "finished", "fp8": "failed", "O3": "interrupted"}
    assert "mixed_precision='fp8' by --set cannot run here" in plans["fp8"]["why"]
    record = plans["fp32"]["record"]
    assert (record["updates"], record["samples"]) == (7, 112)
    assert [value for _, _, value in record["curves"]["accuracy"]] == [0.5, 0.6]
    first = folder / "runs" / "1-fp32-1"
    assert "arguments ['64', 'x']" in (first / "output.txt").read_text()
    assert list(first.glob("project/checkpoints/step-*"))  # in a folder of its own
    assert not (tmp_path / "checkpoints").exists()
    assert (folder / "compare.png").exists()


def recording(folder: Path, seconds: float, losses: list[float], plan: Any = (), machine: Any = ()) -> None:
    """A run that was recorded: 100 updates of 10 samples in `seconds`."""
    facts = {"plan": dict(plan), "machine": MACHINE | dict(machine)}
    begin = {"time": 1e9, "rank": 0, "ranks": 1, "memory": "process", **facts}
    count = {"updates": 100, "samples": 1000}
    lines = [{"event": "begin", "at": 0.0, **begin}]
    lines += [{"event": "first", "at": 1.0, "updates": 1, "samples": 10}]
    for i, loss in enumerate(losses, 1):
        values = {"updates": i, "step": i, "values": {"loss": loss}}
        lines.append({"event": "log", "at": 1 + seconds * i / len(losses), **values})
    lines += [{"event": "memory", "at": 1 + seconds, "bytes": 1 << 30, **count}]
    lines += [{"event": "end", "at": 1 + seconds, "plan": dict(plan), "seconds": seconds, "peak": 1 << 30, **count}]
    folder.mkdir(parents=True)
    (folder / "rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three plans: fp32, bf16 with worse losses, and O1, which takes 30 times as long."""
    monkeypatch.chdir(tmp_path)
    for i in range(5):
        recording(tmp_path / "runs" / f"fp32-{i}", 10 + i / 10, [2.0, 1.0])
        recording(tmp_path / "runs" / f"bf16-{i}", 13 + i / 10, [2.0, 1.06])
        recording(tmp_path / "runs" / f"O1-{i}", 306 + i, [2.0, 1.0])
    return [f"{name}=runs/{name}-{i}" for name in ("fp32", "bf16", "O1") for i in range(5)]


def test_runs_that_exist_are_compared(recordings, fonts, tmp_path, capsys):
    assert main(["compare", *recordings, "--output", "out"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Use fp32: bf16 took 1.29 × as long (5 runs each)."
    assert lines[3].split()[:5] == ["→", "fp32", "10.2", "s", "1.00"]
    verdict = json.loads((tmp_path / "out" / "compare.json").read_text())["verdict"]
    assert verdict["recommended"] == "fp32"
    assert [standing["result"] for standing in verdict["standings"]] == ["reference", "worse", "follows"]
    assert main(["compare", "runs/fp32-0", "runs/O1-0", "--output", "two"]) == 0
    sentence = "Probably use fp32-0: O1-0 took 31 × as long (1 run each)"
    assert capsys.readouterr().out.startswith(sentence)
