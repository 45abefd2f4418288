"""What ``easymp launch`` makes of its words; the launching itself is in test_launcher."""

from __future__ import annotations

import argparse

import pytest

from easymp.cli import launch, main


@pytest.fixture
def launched(monkeypatch):
    """The calls of launch_script."""
    calls = []
    monkeypatch.setattr(launch, "launch_script", lambda *args, **options: calls.append((args, options)) or 9)
    return calls


@pytest.mark.parametrize(
    ("words", "args", "options"),
    [
        ("train.py", ("train.py", [], None), {"module": False, "max_restarts": 0}),
        ("--processes 2 train.py --lr 1", ("train.py", ["--lr", "1"], 2), {"module": False, "max_restarts": 0}),
        ("-m pkg.train -m x", ("pkg.train", ["-m", "x"], None), {"module": True, "max_restarts": 0}),
        (
            "train.py --processes 9 --help",
            ("train.py", ["--processes", "9", "--help"], None),
            {"module": False, "max_restarts": 0},
        ),
        ("train.py a -- b --", ("train.py", ["a", "--", "b", "--"], None), {"module": False, "max_restarts": 0}),
        ("-- train.py -- b", ("train.py", ["--", "b"], None), {"module": False, "max_restarts": 0}),
        ("--max-restarts 3 -m --processes 4 t", ("t", [], 4), {"module": True, "max_restarts": 3}),
    ],
)
def test_words(launched, words, args, options):
    assert main(["launch", *words.split()]) == 9
    assert launched == [(args, options)]


def test_a_missing_script_is_said_in_a_sentence(capsys):
    assert main(["launch", "nowhere.py"]) == 1
    assert capsys.readouterr().err == "easymp: 'nowhere.py' is no file: pass the script's path, or -m and a module's name\n"


def test_help_has_examples():
    parser = argparse.ArgumentParser()
    launch.arguments(parser)
    assert "examples:" in launch.__doc__
