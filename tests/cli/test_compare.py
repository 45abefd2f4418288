"""``easymp compare``: its words, its table, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from easymp.cli import compare, main
from easymp.comparing.running import INTERRUPTED
from easymp.comparing.variants import Variant

from ..comparing.made import comparison, run

FP32, BF16 = Variant("fp32"), Variant("bf16")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return "train.py"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What `compare` is called with; two plans have run, and one failed."""
    calls: list[tuple[Any, ...]] = []

    def fake(task: Any, chosen: Any, folder: Path, **options: Any) -> Any:
        options.pop("tell")(chosen[0], 1, None)
        calls.append((task, [variant.override() for variant in chosen], folder, options))
        folder.mkdir(exist_ok=True)
        return comparison(
            run(FP32, 10, values={"loss": [2, 1]}),
            run(BF16, None, why="RefusedError: no\x1b[2J"),
            folder=folder,
        )

    monkeypatch.setattr(compare, "compare", fake)
    monkeypatch.setattr(compare, "write_report", lambda found, written: "")
    return calls


@pytest.mark.parametrize(
    "words",
    [
        "train.py --precision fp32,bf16 --repeats 3 --output out -- --epochs 2 --repeats 9 -- x",
        "--precision fp32,bf16 --output out train.py --repeats 3 -- --epochs 2 --repeats 9 -- x",
        "--precision fp32,bf16 --output out --repeats 3 train.py -- --epochs 2 --repeats 9 -- x",
    ],
)
def test_options_stand_before_and_after_the_script(
    words: str, script: str, asked: list[Any], tmp_path: Path
) -> None:
    assert main(["compare", *words.split()]) == 1
    ((task, overrides, folder, options),) = asked
    assert (task.script, task.module) == ("train.py", False)
    assert task.arguments == ["--epochs", "2", "--repeats", "9", "--", "x"]
    assert overrides == ["mixed_precision=fp32", "mixed_precision=bf16"]
    assert folder == tmp_path / "out"
    assert options == {"repeats": 3, "seed": None, "metrics": []}


@pytest.mark.parametrize(
    "words",
    [
        "",
        "train.py --epochs 3",
        "train.py --repeats 0",
        "train.py --processes 1,x",
        "train.py extra",
        "train.py --prec fp32",
    ],
)
def test_wrong_usage_is_2(
    words: str, script: str, asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *words.split()]) == 2
    assert "usage: easymp compare" in capsys.readouterr().err
    assert not asked


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nowhere.py", "'nowhere.py' is no file"),
        ("train.py --precision bf61", "did you mean 'bf16'"),
        ("train.py --output .", "is there, and not empty"),
    ],
)
def test_errors_are_a_sentence(
    words: str, said: str, script: str, asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *words.split()]) == 1
    assert said in capsys.readouterr().err
    assert not asked


def test_the_table_and_the_reason_of_a_failure(
    script: str, asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["compare", script, "--output", "out"])
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].split() == ["time", "ratio", "samples/s", "memory", "loss", "start-up"]
    assert lines[1].split() == ["fp32", "10.0", "s", "1.00", "100", "1.0", "GiB", "1", "3", "s"]
    assert lines[2].split() == ["bf16", "–", "–", "–", "–", "–", "–"]
    assert lines[3] == "bf16 failed: RefusedError: no\\x1b[2J"
    assert "\x1b" not in out
    assert "Only fp32 finished" in out
    assert lines[-1] == "wrote out/compare.json"


def test_json_is_one_object(script: str, asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    main(["compare", script, "--output", "out", "--json"])
    record = json.loads(capsys.readouterr().out)
    assert [plan["name"] for plan in record["plans"]] == ["fp32", "bf16"]
    assert record["plans"][1]["runs"][0]["why"] == "RefusedError: no\x1b[2J"


def test_an_interruption_is_130_and_shows_what_is_done(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    runs = [run(FP32, 10), run(BF16, None, why="stopped by a signal", status=INTERRUPTED)]
    monkeypatch.setattr(
        "easymp.comparing.comparison.read", lambda folder: runs[0].record if "fp32" in str(folder) else None
    )
    ends = iter(runs)

    def end(task: Any, variant: Variant, folder: Path, seed: int | None) -> Any:
        folder.mkdir(parents=True)
        return next(ends).end

    monkeypatch.setattr("easymp.comparing.comparison.run", end)
    monkeypatch.setattr(compare, "write_report", lambda found, written: "")
    assert main(["compare", script, "--precision", "fp32,bf16,O1", "--output", "out"]) == 130
    out, err = capsys.readouterr()
    assert "bf16 interrupted: stopped by a signal" in out
    assert "O1" not in out
    assert err.splitlines() == ["1/3 fp32 … finished after 14.0 s", "2/3 bf16 … interrupted after 3 s"]


def test_help_needs_no_torch() -> None:

    code = "import sys; from easymp.cli import main; r = main(['compare', '--help']); print('torch' in sys.modules, r)"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    ).stdout
    assert out.endswith("False 0\n")
    assert "examples:" in out
