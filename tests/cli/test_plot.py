"""`easymp plot`: curves of runs from their JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from easymp import Accelerator
from easymp.cli import main

pytest.importorskip("matplotlib", reason="an optional package is not installed: matplotlib (of the extra 'report')")

pytestmark = pytest.mark.usefixtures("fonts", "folder")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: Any) -> Path:
    """Two runs below a folder; a value that is not finite, a word, a table, and a line that is being written."""
    folder = tmp_path_factory.mktemp("runs")
    for name, rate in (("<slow>", 0.01), ("fast", 0.1)):
        with Accelerator(cpu=True, project_dir=folder / name, log_with="jsonl") as acc:
            acc.init_trackers("log", {"lr": rate, "model": {"depth": 2}})
            for step in range(3):
                acc.log({"loss": 1 / (1 + step * rate), "phase": "train"}, step=step)
            acc.log({"loss": float("nan"), "val/accuracy": rate}, step=3)
    with open(folder / "fast" / "log.jsonl", "a") as file:
        file.write('{"_step": 4, "_ti')
    return folder


def test_all_runs_below_a_folder_are_drawn_together(runs: Path, capsys: Any) -> None:
    assert main(["plot", str(runs), "--output", "curves.png"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[:3] == [
        ["rows", "step", "loss", "val/accuracy"],
        ["<slow>", "4", "3", "nan", "0.01"],
        ["fast", "4", "3", "nan", "0.1"],
    ]
    assert Path("curves.png").read_bytes().startswith(b"\x89PNG")


def test_names_the_axis_and_the_file_can_be_chosen(runs: Path, capsys: Any) -> None:
    file = str(runs / "fast" / "log.jsonl")
    assert main(["plot", file, "--metric", "val/*", "--x", "time", "--output", "curves.svg"]) == 0
    assert "loss" not in capsys.readouterr().out
    assert "seconds since the start" in Path("curves.svg").read_text()  # matplotlib writes texts as comments
    assert main(["plot", str(runs)]) == 0
    assert {path.name for path in Path().iterdir()} == {"curves.svg", "easymp-plot.svg"}


def test_mistakes_are_named(runs: Path, capsys: Any) -> None:
    Path("other.jsonl").write_text(json.dumps({"event": "begin"}) + "\n")
    for arguments, sentence in (
        ("nowhere", "nowhere: there is no such file or folder"),
        (".", "no run has logged JSON lines below it"),
        ("other.jsonl", "has no rows of a run"),
        (f"{runs} --metric los", "no run has logged a number as 'los', did you mean 'loss'? Logged: loss"),
        (f"{runs} --output x.gif", "ends with .png or .svg"),
        (f"{runs} --html x.html", "--output curves.svg draws a picture, and easymp compare RUN RUN compares runs"),
    ):
        assert main(["plot", *arguments.split()]) == 2
        assert sentence in capsys.readouterr().err


def test_runs_without_rows_or_finite_numbers(capsys: Any) -> None:
    for name, values in (("begun", ()), ("nan", ("NaN",)), ("good", (1, 2))):
        rows = [json.dumps({"_step": 1, "_time": 5, "loss": value}) + "\n" for value in values]
        Path(name).mkdir()
        Path(name, "log.json").write_text("[]")  # another program's
        Path(name, "log.jsonl").write_text("".join(rows) + '{"_step": 4, "_ti')
    assert main(["plot", ".", "--output", "all.svg"]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()[1:4]]
    assert table == [["begun", "0", "0", "–"], ["good", "2", "1", "2"], ["nan", "1", "1", "nan"]]
    assert main(["plot", "nan", "--output", "none.svg"]) == 2
    assert "No curves: of loss no run has logged a finite number" in capsys.readouterr().err
    assert main(["plot", "begun"]) == 2
    assert "log.jsonl has no rows of a run" in capsys.readouterr().err
    assert main(["plot", "nowhere", "good"]) == 0  # the others are drawn
    assert "nowhere: there is no such file or folder" in capsys.readouterr().err


def test_without_matplotlib_the_table_is_printed_and_the_extra_is_named(runs: Path, monkeypatch: Any, capsys: Any):
    monkeypatch.setattr("easymp.cli.terminal.find_spec", lambda name: None)
    assert main(["plot", str(runs)]) == 2
    output, err = capsys.readouterr()
    assert "fast" in output
    assert "matplotlib is not installed: pip install 'easymp[report]'" in err
