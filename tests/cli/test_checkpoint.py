"""``easymp checkpoint``: what people and programs are told, and the exit codes."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from easymp.checkpoint import storage
from easymp.checkpoint.manifest import COMMIT
from easymp.cli import main

from ..checkpoint.samples import flip

OF_ONE, OF_TWO = "step-00000002", "step-00000003"


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing takes so long that progress is told, however busy the machine."""
    monkeypatch.setattr(storage, "SILENT", math.inf)


def told(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    """What ``easymp checkpoint`` with these words prints; errors too."""
    assert main(["checkpoint", *map(str, words)]) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return out + err


def test_wrong_usage_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("", "lst x", "list", "verify --jsn x", "inspect a b"):
        assert "usage:" in told(capsys, *words.split(), code=2)


def test_list(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, one, two = told(capsys, "list", root).splitlines()
    assert head.split() == ["name", "step", "written", "size", "ranks", "line", "continues"]
    assert one.split()[:2] == [OF_ONE, "2"] and "KiB" in one
    assert two.split()[:2] == [OF_TWO, "3"] and two.split()[-2:] == [OF_ONE, "newest"]
    (root / OF_TWO / COMMIT).unlink()
    assert f"{OF_TWO}  " in (text := told(capsys, "list", root)) and "not committed" in text
    entries = json.loads(told(capsys, "list", root, "--json"))
    found = [(e["name"], e["committed"], e["newest"]) for e in entries]
    assert found == [(OF_TWO, False, False), (OF_ONE, True, True)]
    assert "there is no such folder" in told(capsys, "list", root / "none", code=1)
    (root / "empty").mkdir()
    assert told(capsys, "list", root / "empty") == f"no checkpoint in {root / 'empty'}\n"


def test_inspect(samples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "inspect", samples / OF_TWO)
    words = "step     3|2 rank(s)|strategy|fsdp|model |optimizer |float32|state/scheduler_0"
    for word in words.split("|"):
        assert word in text
    assert "tied: model/head.weight = model/embed.weight" in text
    lines = told(capsys, "inspect", samples / OF_TWO, "--tensors").splitlines()
    (row,) = [line for line in lines if line.startswith("model/embed.weight")]
    assert row.split()[1:] == ["float32", "[19,", "16]", "1.2", "KiB", "2"]
    record = json.loads(told(capsys, "inspect", samples / OF_ONE, "--json"))
    assert record["step"] == 2
    assert {t["pieces"] for t in record["tensors"]} == {1}
    assert record["size"] == sum(record["files"].values())
    assert sum(g["size"] for g in record["groups"]) == sum(t["size"] for t in record["tensors"])


def test_verify(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = root / OF_TWO
    assert told(capsys, "verify", folder) == f"{folder}: good, every byte\n"
    flip(folder / "model-00001-of-00002.safetensors", -1)
    text = told(capsys, "verify", folder, code=1)
    words = "model-00001-of-00002.safetensors, block 0, is not what was written: it holds model/embed.weight"
    assert words in text
    assert "1 fault(s); load another checkpoint" in text
    (damage,) = json.loads(told(capsys, "verify", folder, "--json", code=1))
    assert damage["block"] == 0 and damage["tensors"]


def test_diff(samples: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = told(capsys, "diff", samples / OF_ONE, root / OF_ONE)
    assert same.endswith("tensor(s) equal, bit for bit; 0 not, nothing differs\n")
    text = told(capsys, "diff", samples / OF_ONE, root / OF_TWO, code=1)
    assert re.search(r"^state/scheduler_0/last_epoch +2 +3$", text, re.MULTILINE)
    assert re.search(r"^model/embed.weight +304 of 304 elements +by 0\.\d+$", text, re.MULTILINE)
    record = json.loads(told(capsys, "diff", samples / OF_ONE, root / OF_TWO, "--json", code=1))
    assert not record["same"] and "model/embed.weight" in {v["name"] for v in record["values"]}
    assert "neither" in told(capsys, "diff", samples / OF_ONE, root / "none", code=1)


def test_what_is_no_checkpoint_is_one_sentence(root, capsys):
    for action in ("inspect", "verify"):
        for place in (root, root / "none"):
            said = told(capsys, action, place, code=1)
            assert said.startswith(f"easymp: {place}: not a checkpoint") and said.count("\n") == 1
    (root / OF_ONE / COMMIT).unlink()
    assert "not committed" in told(capsys, "verify", root / OF_ONE, code=1)


def test_a_reader_that_stops_early_is_no_error(samples: Path) -> None:
    command = [sys.executable, "-m", "easymp", "checkpoint", "inspect", str(samples / OF_ONE), "--tensors"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        process.wait(60)


def test_merge(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "merge", root / OF_TWO, tmp_path / "weights") == f"wrote {tmp_path / 'weights'}\n"
    assert (tmp_path / "weights" / "model.safetensors").exists()
    assert told(capsys, "merge", "--all", "--max-shard-size", "4KB", root / OF_TWO, tmp_path / "whole")
    assert "nothing differs" in told(capsys, "diff", root / OF_TWO, tmp_path / "whole")
    text = told(capsys, "merge", "--max-shard-size", "4 apples", root / OF_TWO, tmp_path / "x", code=1)
    assert "is not a size" in text and not (tmp_path / "x").exists()


def test_prune(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--keep" in told(capsys, "prune", root, code=2)
    text = told(capsys, "prune", root, "--keep", 1, "--dry-run")
    assert text.splitlines()[:2] == [f"{OF_ONE}  would be removed", f"{OF_TWO}  kept"]
    assert (root / OF_ONE).exists()
    record = json.loads(told(capsys, "prune", root, "--keep", 1, "--json"))
    assert record["removed"] == [OF_ONE] and not (root / OF_ONE).exists()
    assert "at least 1" in told(capsys, "prune", root, "--keep", 0, code=1)


def test_no_damage_is_a_traceback_or_passes_for_good(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, other = root / OF_TWO, root / OF_ONE
    for file in sorted(folder.iterdir()):
        good = file.read_bytes()
        places = (0, 7, 40, len(good) // 2, len(good) - 1)
        damaged = [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in places]
        damaged += [good[:count] for count in (0, 7, 8, 60, len(good) - 1)]
        for content in damaged:
            file.write_bytes(content)
            told(capsys, "verify", folder, code=1)
        for words in (["inspect", folder], ["list", root], ["diff", folder, other]):
            assert main(["checkpoint", *map(str, words)]) in (0, 1)
        file.unlink()
        told(capsys, "verify", folder, code=1)
        file.mkdir()
        told(capsys, "verify", folder, code=1)
        file.rmdir()
        file.write_bytes(good)
    assert told(capsys, "verify", folder).endswith("good, every byte\n")
