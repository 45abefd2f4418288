"""`easymp test`: what is right passes on real ranks, what is wrong is said in a sentence, and a rank that dies is named."""

from __future__ import annotations

import json
import os
import re
from contextlib import closing
from pathlib import Path

import pytest
import torch

import easymp.cli as cli
from easymp import Accelerator
from easymp.cli import test as command
from easymp.cli.selftest import Row, Tried, precisions, ranks, samples, training
from easymp.cli.selftest.__main__ import checks
from easymp.cli.selftest.findings import Diary, Finding, LeftOut, Wrong, read
from easymp.cli.selftest.kernels import kernels
from easymp.cli.selftest.trying import rows
from easymp.errors import WorldError


def on_a_rank(folder: str, strategy: str) -> list[str]:
    said = []
    for check in (
        ranks.collectives,
        ranks.bandwidth,
        training.data,
        training.training,
        lambda acc: training.checkpoints(acc, Path(folder)),
    ):
        with closing(
            Accelerator(seed=0, strategy=strategy, mixed_precision="fp32", dataloader_config=training.SPLIT)
        ) as acc:
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
    first, last = samples.trained_by_hand(torch.device("cpu"))
    assert 0.05 < last < 0.8 * first


def test_one_process_sends_nothing():
    with closing(Accelerator()) as acc, pytest.raises(LeftOut, match="nobody to send to"):
        ranks.bandwidth(acc)


def test_a_wrong_answer_is_a_sentence_with_both(monkeypatch):
    monkeypatch.setitem(training.NEAR, True, -1.0)
    with closing(Accelerator(seed=0, mixed_precision="fp32", dataloader_config=training.SPLIT)) as acc:
        with pytest.raises(
            Wrong, match=r"three epochs in fp32 under single came from a loss of .* to .*; plain torch"
        ):
            training.training(acc)


def test_every_precision_that_is_not_refused_is_near_to_fp32(monkeypatch):
    said = precisions.precisions()
    assert said.startswith("outputs off fp32's: bf16 ")
    assert said.endswith("not here: tf32, fp8") or torch.cuda.is_available()
    monkeypatch.setitem(precisions.NEAR, "bf16", 1e-9)
    with pytest.raises(Wrong, match=r"bf16: outputs lie .*% from fp32's; at most 0.00% is rounding"):
        precisions.precisions()


def test_kernels_are_left_out_with_the_reason():
    with pytest.raises(LeftOut, match="this rank trains on cpu"):
        kernels(torch.device("cpu"))


def test_a_diary_keeps_what_was_begun_and_how_it_ended(tmp_path):
    diary = Diary(tmp_path, 1)
    for error in (None, LeftOut("no GPU"), Wrong("1, not 2"), WorldError("rank 0 is missing"), KeyError("x")):
        with diary.page("sum") as words:
            words.append("3")
            if error is not None:
                raise error
    found = read(tmp_path, 2)
    assert found[0] == []
    assert [f.outcome for f in found[1]] == [
        o for end in ("good", "left out", "bad", "bad", "bad") for o in ("begun", end)
    ]
    assert [f.words for f in found[1][1::2]] == [
        "3",
        "no GPU",
        "1, not 2",
        "WorldError: rank 0 is missing",
        "KeyError: 'x'",
    ]
    assert [f.second_hand for f in found[1][1::2]] == [False, False, False, True, False]


GOOD, BEGUN = Finding("sum", "good", "6", 1.0), Finding("sum", "begun")
BAD, WAITED = (
    Finding("sum", "bad", "1, not 2", 2.0),
    Finding("sum", "bad", "WorldError: timeout", 30.0, second_hand=True),
)


@pytest.mark.parametrize(
    ("found", "outcome", "words"),
    [
        ({0: [BEGUN, GOOD]}, "good", "6"),
        ({0: [BEGUN, BAD]}, "bad", "1, not 2"),
        ({0: [BEGUN, GOOD], 1: [BEGUN, BAD]}, "bad", "rank 1: 1, not 2"),
        ({0: [BEGUN, WAITED], 1: [BEGUN, BAD]}, "bad", "rank 1: 1, not 2"),
        (
            {0: [BEGUN, WAITED], 1: [BEGUN]},
            "bad",
            "rank 1 did not come to the end of it; what was printed above says why",
        ),
        (
            {0: [BEGUN, GOOD], 1: []},
            "bad",
            "rank 1 did not come to the end of it; what was printed above says why",
        ),
        ({0: [BEGUN], 1: [BEGUN]}, "bad", "no rank came to the end of it; what was printed above says why"),
        ({0: [BEGUN, Finding("sum", "left out", "one process")]}, "left out", "one process"),
    ],
)
def test_the_rank_at_fault_is_named(found, outcome, words):
    (row,) = rows(found)
    assert (row.check, row.outcome, row.words) == ("sum", outcome, words)


def test_the_checks_of_a_rank_have_names_in_order(tmp_path):
    names = [name for name, _ in checks(tmp_path)]
    assert names == [
        "plan",
        "collectives",
        "bandwidth",
        "data",
        "training",
        "precision",
        "checkpoint",
        "kernels",
    ]


TRIED = Tried(
    [
        Row("sum", "good", 1.25, "6"),
        Row("kernels", "left out", 0.0, "no GPU"),
        Row("data", "bad", 2.0, "rank 1: 3, not 4"),
    ],
    "device cpu",
    0,
)


def test_the_table_has_a_sentence_for_each_failure():
    text = command.told(TRIED, 2).splitlines()
    assert text[0] == "device cpu"
    assert [line.split()[:2] for line in text[3:6]] == [["sum", "good"], ["kernels", "–"], ["data", "BAD"]]
    assert text[-3:] == ["data: rank 1: 3, not 4", "", "1 of 3 checks failed"]
    assert "exit code 9" in command.told(Tried([], "", 9), 2)


@pytest.mark.parametrize(
    ("tried", "code"), [(TRIED, 1), (Tried(TRIED.rows[:2], "", 0), 0), (Tried([], "", 9), 1)]
)
def test_exit_code_and_json(monkeypatch, capsys, tried, code):
    asked = []
    monkeypatch.setattr(command, "try_out", lambda processes: (asked.append(processes), tried)[1])
    assert cli.main(["test", "--json"]) == code
    answer = json.loads(capsys.readouterr().out)
    assert answer["good"] is (code == 0)
    assert len(answer["rows"]) == len(tried.rows)
    assert asked == [2 if not torch.cuda.is_available() else torch.cuda.device_count()]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_the_command_as_typed(tmp_path, monkeypatch, capfd, processes):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["test", "--processes", str(processes)]) == 0
    out = capfd.readouterr().out
    assert out.splitlines()[0].split()[:2] == ["processes", str(processes)]
    assert out.endswith(f"all is well on {processes} process{'es' * (processes - 1)}\n")
    assert not os.listdir(tmp_path)


DEADLY = """
import importlib.machinery, os, sys

class Finder:
    def find_spec(self, name, path, target=None):
        if name != "easymp.cli.selftest.training":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.training = lambda acc: os.kill(os.getpid(), 9)

        spec.loader.exec_module = exec_module
        return spec

if os.environ.get("RANK") == "1":
    sys.meta_path.insert(0, Finder())
"""


@pytest.mark.slow
def test_a_rank_that_dies_is_a_row_that_says_so(tmp_path, monkeypatch, capfd):
    """A sitecustomize by which rank 1's training is its end."""
    (tmp_path / "sitecustomize.py").write_text(DEADLY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["test", "--processes", "2"]) == 1
    caught = capfd.readouterr()
    # The launcher stops the other, unless that hears of it first.
    assert re.search(
        "training: (no rank came|rank 1 did not come) to the end of it; what was printed above says why",
        caught.out,
    )
    assert "rank 1 of 2 failed first: killed by SIGKILL" in caught.err
