"""``easymp checkpoint``: its output for people and programs, and the exit codes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from easymp.checkpoint import progress
from easymp.checkpoint.manifest import COMMIT
from easymp.cli import main

from ..checkpoint.samples import flip

OF_ONE, OF_TWO = "step-00000002", "step-00000003"


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing takes so long that progress is shown, however busy the machine."""
    monkeypatch.setattr(progress, "SILENT", math.inf)


def call(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    """The output of ``easymp checkpoint`` with these arguments, with the errors."""
    assert main(["checkpoint", *map(str, arguments)]) == code
    output, err = capsys.readouterr()
    assert "Traceback" not in err
    return output + err


def test_wrong_usage_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ("", "lst x", "list", "verify --jsn x", "inspect a b"):
        assert "usage:" in call(capsys, *arguments.split(), code=2)


def test_list(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, one, second_run = call(capsys, "list", root).splitlines()
    assert head.split() == ["name", "step", "written", "size", "ranks", "line", "continues"]
    assert one.split()[:2] == [OF_ONE, "2"] and "KiB" in one
    assert second_run.split()[:2] == [OF_TWO, "3"] and second_run.split()[-2:] == [OF_ONE, "newest"]
    (root / OF_TWO / COMMIT).unlink()
    assert f"{OF_TWO}  " in (text := call(capsys, "list", root)) and "not committed" in text
    entries = json.loads(call(capsys, "list", root, "--json"))
    states = [(e["name"], e["committed"], e["newest"]) for e in entries]
    assert states == [(OF_TWO, False, False), (OF_ONE, True, True)]
    (root / "empty").mkdir()
    root.rename(root.parent / "checkpoints")
    assert OF_ONE in call(capsys, "list", root.parent)  # a project's folder
    root.mkdir()
    (root / "empty").mkdir()
    assert call(capsys, "list", root / "empty") == f"no checkpoint in {root / 'empty'}\n"


def test_inspect(samples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = call(capsys, "inspect", samples / OF_TWO)
    for fact in "step        3|2 rank(s)|strategy|fsdp|model |optimizer |float32|state/scheduler_0".split("|"):
        assert fact in text
    assert call(capsys, "inspect", samples) == text  # a run's folder means its newest checkpoint
    assert "tied: model/head.weight = model/embed.weight" in text
    lines = call(capsys, "inspect", samples / OF_TWO, "--tensors").splitlines()
    (row,) = [line for line in lines if line.startswith("model/embed.weight")]
    assert row.split()[1:] == ["float32", "[19,", "16]", "1.2", "KiB", "2"]
    record = json.loads(call(capsys, "inspect", samples / OF_ONE, "--json"))
    assert record["step"] == 2
    assert {t["pieces"] for t in record["tensors"]} == {1}
    assert record["size"] == sum(record["files"].values())


def test_verify(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = root / OF_TWO
    assert call(capsys, "verify", folder) == f"{folder}: good, every byte\n"
    flip(folder / "model-00001-of-00002.safetensors", -1)
    text = call(capsys, "verify", folder, code=1)
    assert "model-00001-of-00002.safetensors, block 0, is not what was written: it holds model/embed.weight" in text
    assert "1 fault(s); load another checkpoint" in text
    (damage,) = json.loads(call(capsys, "verify", folder, "--json", code=1))
    assert damage["block"] == 0 and damage["tensors"]


def test_a_folder_without_a_checkpoint_is_one_sentence(root, capsys):
    (root / "empty").mkdir()
    for action in ("inspect", "verify"):
        output = call(capsys, action, root / "empty", code=2)
        assert output.startswith(f"easymp: {root / 'empty'}: not a checkpoint") and output.count("\n") == 1
    (root / OF_ONE / COMMIT).unlink()
    assert "not committed" in call(capsys, "verify", root / OF_ONE, code=1)


def test_a_reader_that_stops_early_is_no_error(samples: Path) -> None:
    command = [sys.executable, "-m", "easymp", "checkpoint", "inspect", str(samples / OF_ONE), "--tensors"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        process.wait(60)


def test_convert(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "weights"
    output = call(capsys, "merge", root, target)  # the newest, by the former name
    assert output.startswith(f"wrote {target}: model.safetensors (")
    monkeypatch.setattr(sys, "stdin", None)
    assert "--force to replace it" in call(capsys, "convert", root, target, code=2)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda question: "n")
    call(capsys, "convert", root, target, code=130)
    assert call(capsys, "convert", "--force", root, target) == output
    output = call(capsys, "convert", "--max-shard-size", "4 apples", root / OF_TWO, tmp_path / "x", code=2)
    assert "is not a size" in output and not (tmp_path / "x").exists()


def test_prune(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--keep" in call(capsys, "prune", root, code=2)
    text = call(capsys, "prune", root, "--keep", 1, "--dry-run")
    assert text.splitlines()[:2] == [f"{OF_ONE}  would be removed", f"{OF_TWO}  kept"]
    assert (root / OF_ONE).exists()
    record = json.loads(call(capsys, "prune", root, "--keep", 1, "--json"))
    assert record["removed"] == [OF_ONE] and not (root / OF_ONE).exists()
    assert "at least 1" in call(capsys, "prune", root, "--keep", 0, code=2)


def test_damage_of_each_file_is_a_sentence(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """checkpoint/test_faults.py damages every byte."""
    folder = root / OF_TWO
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        flipped = bytes([content[0] ^ 1]) + content[1:]
        for wrong in (flipped, content[: len(content) // 2], b""):
            file.write_bytes(wrong)
            call(capsys, "verify", folder, code=1)
        for arguments in (["inspect", folder], ["list", root]):
            assert main(["checkpoint", *map(str, arguments)]) in (0, 1)
        file.unlink()
        call(capsys, "verify", folder, code=1)
        file.mkdir()
        call(capsys, "verify", folder, code=1)
        file.rmdir()
        file.write_bytes(content)
    assert call(capsys, "verify", folder).endswith("good, every byte\n")
