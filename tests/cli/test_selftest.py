"""``easymp test``: a right answer passes on real ranks, a wrong one is said in a sentence, and a rank that dies is named."""

from __future__ import annotations

import json
import os
import re
from contextlib import closing
from pathlib import Path

import pytest
import torch

from easymp import Accelerator, WorldError
from easymp.cli import main, selftest
from easymp.cli import test as command


def on_a_rank(folder: str, strategy: str) -> list[str]:
    said = []
    for check in (
        selftest.collectives,
        selftest.bandwidth,
        selftest.data,
        selftest.training,
        lambda acc: selftest.checkpoints(acc, Path(folder)),
    ):
        options = {"strategy": strategy, "mixed_precision": "fp32", "dataloader_config": selftest.SPLIT}
        with closing(Accelerator(seed=0, **options)) as acc:
            said.append(check(acc))
    return said


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_checks_pass_on_two_ranks(ranks, tmp_path, strategy):
    for said in ranks(on_a_rank, str(tmp_path), strategy):
        assert said[0] == "2 ranks on cpu"
        assert "between ranks" in said[1]
        assert said[2] == "101 samples, each once"
        assert said[3].startswith(f"{strategy}, fp32: loss ")
        assert said[4].endswith("bit for bit")


def test_the_training_has_something_left_to_learn():
    first, last = selftest.train_plain(torch.device("cpu"))
    assert 0.05 < last < 0.8 * first


def test_every_precision_that_is_not_refused_is_near_to_fp32(monkeypatch):
    said = selftest.precisions()
    assert said.startswith("outputs off fp32's: bf16 ")
    assert said.endswith("not here: tf32, fp8") or torch.cuda.is_available()
    monkeypatch.setitem(selftest.NEAR, "bf16", 1e-9)
    with pytest.raises(selftest.Wrong, match=r"bf16: outputs lie .*% from fp32's; at most 0.00% is rounding"):
        selftest.precisions()


def test_a_check_is_written_down_with_its_outcome(tmp_path):
    def alone() -> str:
        with closing(Accelerator()) as acc:
            return selftest.bandwidth(acc)

    def fails(error: Exception):
        def run() -> str:
            raise error

        return run

    checks = (
        lambda: "3",
        alone,
        lambda: selftest.kernels(torch.device("cpu")),
        fails(selftest.Wrong("1, not 2")),
        fails(WorldError("rank 0 is missing")),
        fails(KeyError("x")),
    )
    for check in checks:
        selftest.note(tmp_path, "sum", check)
    found = [json.loads(line) for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()]
    assert [f["outcome"] for f in found[::2]] == ["begun"] * 6
    assert [f["outcome"] for f in found[1::2]] == ["good", "left out", "left out", "bad", "bad", "bad"]
    assert [f["words"] for f in found[1::2]] == [
        "3",
        "one process sends nothing",
        "they are for NVIDIA GPUs, and this rank trains on cpu",
        "1, not 2",
        "WorldError: rank 0 is missing",
        "KeyError: 'x'",
    ]
    assert [f["second_hand"] for f in found[1::2]] == [False, False, False, False, True, False]


def finding(outcome: str, words: str = "", second_hand: bool = False) -> dict[str, object]:
    return {"check": "sum", "outcome": outcome, "words": words, "seconds": 1.0, "second_hand": second_hand}


GOOD, BEGUN, BAD = finding("good", "6"), finding("begun"), finding("bad", "1, not 2")
WAITED = finding("bad", "WorldError: timeout", second_hand=True)


@pytest.mark.parametrize(
    ("found", "outcome", "words"),
    [
        ({0: [BEGUN, GOOD]}, "good", "6"),
        ({0: [BEGUN, BAD]}, "bad", "1, not 2"),
        ({0: [BEGUN, GOOD], 1: [BEGUN, BAD]}, "bad", "rank 1: 1, not 2"),
        ({0: [BEGUN, WAITED], 1: [BEGUN, BAD]}, "bad", "rank 1: 1, not 2"),
        ({0: [BEGUN, WAITED], 1: [BEGUN]}, "bad", "rank 1 did not come to the end of it"),
        ({0: [BEGUN, GOOD], 1: []}, "bad", "rank 1 did not come to the end of it"),
        ({0: [BEGUN], 1: [BEGUN]}, "bad", "no rank came to the end of it"),
        ({0: [BEGUN, finding("left out", "one process")]}, "left out", "one process"),
    ],
)
def test_the_rank_at_fault_is_named(found, outcome, words):
    (row,) = command.rows(found)
    assert (row.check, row.outcome) == ("sum", outcome) and row.words.startswith(words)


ROWS = [
    command.Row("sum", "good", 1.25, "6"),
    command.Row("kernels", "left out", 0.0, "no GPU"),
    command.Row("data", "bad", 2.0, "rank 1: 3, not 4"),
]


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (command.Result(ROWS, "device cpu", 0), 1),
        (command.Result(ROWS[:2], "device cpu", 0), 0),
        (command.Result([], "", 9), 1),
    ],
)
def test_what_is_printed_and_the_exit_code(monkeypatch, capsys, result, code):
    asked = []
    monkeypatch.setattr(command, "run_checks", lambda processes: (asked.append(processes), result)[1])
    assert main(["test", "--json"]) == main(["test"]) == code
    answer, _, text = capsys.readouterr().out.partition("\n}\n")
    assert json.loads(answer + "}")["good"] is (code == 0)
    assert asked == [max(torch.cuda.device_count(), 1 if torch.cuda.is_available() else 2)] * 2
    if result.rows:
        assert [line.split()[:2] for line in text.splitlines()[3:5]] == [["sum", "good"], ["kernels", "–"]]
        assert code == 0 or text.endswith("data: rank 1: 3, not 4\n\n1 of 3 checks failed\n")
    else:
        assert "exit code 9" in text


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_the_command_as_typed(tmp_path, monkeypatch, capfd, processes):
    monkeypatch.chdir(tmp_path)
    assert main(["test", "--processes", str(processes)]) == 0
    out = capfd.readouterr().out
    assert out.splitlines()[0].split()[:2] == ["processes", str(processes)]
    assert out.endswith(f"all is well on {processes} process{'es' * (processes - 1)}\n")
    assert not os.listdir(tmp_path)


DEADLY = """
import importlib.machinery, os, sys

class Finder:
    def find_spec(self, name, path, target=None):
        if name != "easymp.accelerator":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.Accelerator.load_state = lambda *args: os.kill(os.getpid(), 9)

        spec.loader.exec_module = exec_module
        return spec

if os.environ.get("RANK") == "1":
    sys.meta_path.insert(0, Finder())
"""


@pytest.mark.slow
def test_a_rank_that_dies_is_a_row_that_says_so(tmp_path, monkeypatch, capfd):
    """A sitecustomize kills rank 1 when it loads its checkpoint."""
    (tmp_path / "sitecustomize.py").write_text(DEADLY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.chdir(tmp_path)
    assert main(["test", "--processes", "2"]) == 1
    caught = capfd.readouterr()
    # The launcher stops the other rank, unless that one notices first.
    assert re.search("checkpoint: (no rank came|rank 1 did not come) to the end of it", caught.out)
    assert "rank 1 of 2 failed first: killed by SIGKILL" in caught.err
