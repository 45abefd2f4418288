"""``easymp prove`` with more ranks than processors: these are forks of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from easymp.cli import main, prove
from easymp.cli.prove.forks import packages_of

from .test_prove import SCRIPT


@pytest.fixture
def proved(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs ``easymp prove``, with forks from so many ranks on; returns its JSON with the exit code."""
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(arguments: str, processors: int = 1) -> dict[str, Any]:
        monkeypatch.setattr(prove, "processors", lambda: processors)
        words = ["--json", "--set", "cpu=true", "--steps", "2", *arguments.split()]
        code = main(["prove", str(tmp_path / "train.py"), *words])
        return {"code": code, **json.loads(capsys.readouterr().out)}

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "processes"),
    [("zero1", 2), ("hsdp", 4), ("tensor_parallel", 4), ("pipeline", 2)],
)
def test_forks_have_the_verdict_of_launched_processes(proved: Any, strategy: str, processes: int) -> None:
    options = {"hsdp": "shard_size=2", "tensor_parallel": "size=2"}.get(strategy)  # the latter inside fsdp
    arguments = f"--strategy {strategy} --processes {processes} --precision fp32"
    if options is not None:
        arguments += f" --set strategy_options.{options}"
    forked, launched = proved(arguments), proved(arguments, processors=8)
    assert (forked["verdict"], forked["updates"]) == (launched["verdict"], launched["updates"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "verdict", "sentences"),
    [
        ("--strategy fsdp --processes 16 -- nodes", "differs", ["0.5 × those of one process"]),
        ("--strategy hsdp --processes 6 --set strategy_options.shard_size=4", "failed", ["shard_size=4"]),
        ("--strategy fsdp --processes 16 --steps 9 -- uneven", "failed", ["rank"]),
        ("--strategy ddp --processes 8 -- nodes", "proven", []),  # the faults of 16 ranks do not show at 8
    ],
)
def test_faults_of_many_ranks_are_named(proved: Any, arguments: str, verdict: str, sentences: list[str]) -> None:
    record = proved(arguments)
    text = " ".join([record["sentence"], *record["hints"]])
    assert record["verdict"] == verdict, text
    assert [sentence for sentence in sentences if sentence not in text] == [], text


def test_installed_packages_are_imported_once_and_the_scripts_own_modules_by_each_rank(folder: Path) -> None:
    Path("own.py").write_text("raise ValueError")
    Path("train.py").write_text("import own, json\nfrom torch.nn import Linear\nfrom . import x\ndef f(): import numpy")
    assert packages_of(Path("train.py")) == ["json", "torch.nn"]
