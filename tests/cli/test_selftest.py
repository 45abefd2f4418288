"""``easymp test``.

A right answer passes on real ranks, a wrong one fails with a sentence, and a rank that dies is named.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from easymp import Accelerator
from easymp.cli import main, selftest
from easymp.cli import test as command


def test_every_precision_that_is_not_refused_is_near_to_fp32(monkeypatch):
    summary = selftest.check_precisions()
    assert summary.startswith("outputs off fp32's: bf16 ")
    assert summary.endswith("not here: tf32, fp8") or torch.cuda.is_available()
    monkeypatch.setitem(selftest.TOLERANCES, "bf16", 1e-9)
    with pytest.raises(selftest.WrongAnswer, match=r"bf16: outputs lie .*% from fp32's; at most 0.00% is rounding"):
        selftest.check_precisions()


def same(acc: Accelerator, folder: Path) -> str:
    return "6"


def one_is_wrong(acc: Accelerator, folder: Path) -> str:
    if acc.process_index == 1:
        raise selftest.WrongAnswer("1, not 2")
    return "6"


def leaves_out(acc: Accelerator, folder: Path) -> str:
    raise selftest.SkippedCheck("one process")


def run_checks(folder: str) -> None:
    checks = {"same": same, "wrong": one_is_wrong, "left": leaves_out}
    with mock.patch.object(selftest, "CHECKS", checks):
        selftest.main(Path(folder))


def test_the_rank_at_fault_is_named(ranks: Any, tmp_path: Path) -> None:
    ranks(run_checks, str(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / command.ROWS).read_text().splitlines()]
    outcomes = [(check, outcome, message) for check, outcome, _, message in rows if outcome != command.BEGUN]
    assert outcomes == [
        ("same", "good", "6"),
        ("wrong", "bad", "rank 1: 1, not 2"),
        ("left", "left out", "one process"),
    ]


@pytest.mark.slow
def test_the_command_as_typed(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EASYMP_STRATEGY", "fsdp")
    monkeypatch.setenv("EASYMP_GRADIENT_ACCUMULATION_STEPS", "4")  # the checks step each batch
    assert main(["test", "--processes", "2"]) == 0
    output = capfd.readouterr().out
    assert output.splitlines()[0].split()[:2] == ["processes", "2"]
    assert re.search(r"^training +good .* fsdp, [^ ]+: loss ", output, re.M)
    assert re.search(r"^kernels +– ", output, re.M) or torch.cuda.is_available()
    assert output.endswith("all is well on 2 processes\n")
    assert not os.listdir(tmp_path)


DEADLY = """
import os, sys

def hook(event, args):
    if event == "open" and str(args[0]).endswith(("manifest.json", ".safetensors")):
        os.kill(os.getpid(), 9)

if os.environ.get("RANK") == "1":
    sys.addaudithook(hook)
"""


@pytest.mark.slow
@pytest.mark.cold
def test_a_rank_that_dies_is_a_row_that_says_so(tmp_path, monkeypatch, capfd):
    (tmp_path / "sitecustomize.py").write_text(DEADLY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.chdir(tmp_path)
    assert main(["test", "--processes", "2", "--json"]) == 1
    output = capfd.readouterr()
    rows = {row["check"]: row for row in json.loads(output.out)["rows"]}
    assert rows["training"]["outcome"] == "good" and rows["checkpoint"]["outcome"] == "bad"
    assert rows["checkpoint"]["message"] == "a rank ended before the end of it; the output above says why"
    assert "rank 1 of 2 failed first: killed by SIGKILL" in output.err
