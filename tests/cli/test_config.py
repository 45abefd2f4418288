"""``easymp config``: which questions are asked on which machine, what an answer is told, and what comes into the file."""

from __future__ import annotations

import os
import re
import signal
import sys
import termios
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from easymp import Settings, resolve
from easymp.cli import main

from ..hardware.machines import MACHINES

pexpect = pytest.importorskip(
    "pexpect", reason="an optional package is not installed: pexpect (of the extra 'test')"
)
FILE = Path("easymp.toml")
TITLES = {
    "Processes": "processes",
    "Nodes": "nodes",
    "Precision": "mixed_precision",
    "Strategy": "strategy",
    "Gradient accumulation": "gradient_accumulation_steps",
    "Place of checkpoints": "project_dir",
}
ALWAYS = ["gradient_accumulation_steps", "project_dir"]
ONE_DEVICE = ["mixed_precision", *ALWAYS]
CPU = ["processes", "mixed_precision", *ALWAYS]
SEVERAL = ["processes", "nodes", "mixed_precision", "strategy", *ALWAYS]
CLEAR = "\x15"  # Ctrl-U: a prompt keeps a wrong answer


def launching(path: Path = FILE) -> dict[str, Any]:
    """The table of `easymp launch` in the file that was written."""
    return tomllib.loads(path.read_text()).get("launch", {})


def asked(said: str) -> list[str]:
    return [TITLES[line] for line in said.splitlines() if line in TITLES]


# machine: what is asked where all defaults are taken; the precision and the processes proposed
ASKED = {
    **dict.fromkeys(("P100", "M-series Mac"), (ONE_DEVICE, "fp32", "1")),
    **dict.fromkeys(("V100", "T4"), (ONE_DEVICE, "fp16", "1")),
    "GTX 1660": (ALWAYS, "fp32", "1"),  # nothing but fp32 runs there
    **dict.fromkeys(
        ("A100", "L4", "H100", "B200", "RTX 5090", "MI300X", "Intel XPU"), (ONE_DEVICE, "bf16", "1")
    ),
    **dict.fromkeys(("2xA100 NVLink", "2xRTX 3090"), (SEVERAL, "bf16", "2")),
    "8xH100": (SEVERAL, "bf16", "8"),
    "laptop CPU": (CPU, "fp32", "1"),
    **dict.fromkeys(("Zen 4 server", "Sapphire Rapids", "Graviton 4"), (CPU, "auto", "1")),
}


@pytest.mark.parametrize("name", MACHINES)
def test_only_what_changes_anything_here_is_asked(name, talk):
    questions, precision, processes = ASKED[name]
    said = talk(name)
    assert asked(said) == questions
    assert re.search(rf"^precision +{precision} \(\S", said, re.M)
    assert re.search(rf"^processes +{processes} \(", said, re.M)
    assert launching() == {}
    assert (resolve().mixed_precision, resolve().strategy) == ("auto", "auto")


def test_all_six_are_asked_where_that_is_wanted(talk):
    assert asked(talk("GTX 1660", words="--all")) == list(TITLES.values())


def test_what_was_announced_or_answered_opens_questions(talk, monkeypatch):
    assert asked(talk("laptop CPU", "2")) == [*CPU[:2], "strategy", *ALWAYS]
    assert launching() == {"processes": 2}
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    said = talk("A100", words="--file nodes.toml")
    assert asked(said) == ["nodes", "mixed_precision", "strategy", *ALWAYS]
    assert "auto is 2 (SLURM_JOB_NUM_NODES in the environment)" in said


def test_what_was_answered_ahead_is_not_asked(talk):
    words = "--set strategy=fsdp --set processes=4 --set seed=7 --set memory=60GiB"
    assert asked(talk("8xH100", words=words)) == ["nodes", "mixed_precision", *ALWAYS]
    assert resolve() == resolve(strategy="fsdp", seed=7, memory="60GiB")
    assert launching() == {"processes": 4}


def test_a_person_goes_through_it_back_and_forth(talk):
    said = talk("8xH100", "4", "back", "", "2", "fp16:", "back:", "bf16:", "fsdp:", "3", "runs", "back")
    assert asked(said) == [
        *("processes", "nodes", "processes", "nodes", "mixed_precision", "strategy", "mixed_precision"),
        *("strategy", *ALWAYS, "project_dir"),
    ]
    assert resolve() == resolve(
        mixed_precision="bf16", strategy="fsdp", gradient_accumulation_steps=3, project_dir="runs"
    )
    assert launching() == {"processes": 4, "nodes": "2"}


@pytest.mark.parametrize(
    ("name", "before", "wrong", "right"),
    [
        ("2xRTX 3090", [], ["3", "0", "two"], {"processes": 1}),
        ("2xRTX 3090", [""], ["0", "4:2", "many"], {"nodes": "2"}),
        ("laptop CPU", ["", ""], ["0", "1.5"], {"gradient_accumulation_steps": 2}),
        ("laptop CPU", ["", "", ""], ["file/runs", "s4://bucket"], {"project_dir": "logs"}),
    ],
)
def test_a_wrong_answer_is_not_taken(name, before, wrong, right, talk):
    Path("file").touch()
    ((setting, value),) = right.items()
    talk(name, *before, f"\r{CLEAR}".join([*wrong, str(value)]))
    assert {**vars(resolve()), **launching()}[setting] == value


def test_what_is_impossible_cannot_be_chosen(talk):
    assert "has no bf16 units" in talk("T4", "bf16:")
    assert resolve().mixed_precision == "auto"


def test_a_strategy_is_forgotten_with_the_processes_that_needed_it(talk):
    talk("laptop CPU", "2", "", "ddp:", "back", "back:", "back:", "1")
    assert launching() == {"processes": 1}
    assert resolve().strategy == "auto"


def test_what_is_possible_and_slow_is_said(talk):
    assert "This CPU has no bf16 instructions, so it is slower than fp32" in talk("laptop CPU", "", "bf16:")
    assert "99 processes take turns on 8 thread(s)" in talk("laptop CPU", "99", words="--file b.toml")
    assert "On one node it needs shard_size" in talk("8xH100", "", "", "", "hsdp:", words="--file c.toml")


@pytest.mark.parametrize("number", [0, 3, 6])
def test_leaving_at_any_prompt_writes_nothing(number, talk):
    assert "Nothing was written" in talk("8xH100", *[""] * number, leave="\x03", code=130)
    assert not any(Path().iterdir())


def test_no_at_the_end_writes_nothing(talk):
    talk("T4", "", "", "", "\x1b[B", code=130)  # down, to "no"
    assert not any(Path().iterdir())


@pytest.mark.slow
def test_a_measurement_is_said_and_kept_as_the_reason(talk):
    said = talk("laptop CPU", "", "fp32:", words="--measure")
    assert "measured on cpu in" in said and "tf32 was left out: " in said
    assert re.search(r"^mixed_precision = \"fp32\".*timed here: ", FILE.read_text(), re.M)


def test_without_a_terminal_it_says_what_to_pass(config, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)  # closed; pytest's own may be a terminal
    said = config("laptop CPU", "--set", "processes=2", code=2)
    assert "not a terminal" in said and "Pass --yes" in said and "--dry-run" in said
    assert not FILE.exists()


def test_arrow_keys_choose(talk):
    talk("2xA100 NVLink", "", "", "\x1b[B", "\x1b[B\x1b[B\x1b[A")  # what is impossible is passed over
    assert (resolve().mixed_precision, resolve().strategy) == ("fp32", "ddp")


def test_yes_takes_the_defaults(config):
    said = config("laptop CPU", "--yes", "--set", "processes=2", "--set", "strategy=zero1")
    assert said.endswith("\nNext\n  easymp launch train.py\n") and "\x1b" not in said
    assert resolve() == resolve(strategy="zero1")
    assert launching() == {"processes": 2}


def test_dry_run_writes_nothing(config, talk):
    for said in (config("8xH100", "--yes", "--dry-run"), talk("8xH100", words="--dry-run")):
        assert '\neasymp.toml\nmixed_precision = "auto"\nstrategy = "auto"\n' in said
        assert "Nothing is written, as --dry-run asks" in said
        assert not any(Path().iterdir())


def test_ten_lines_of_the_file_are_shown_and_its_comments_are_in_it(config, talk):
    sets = [f"scaler_options.{name}={value}" for name, value in SCALER.items()]
    words = [word for pair in ["seed=1", *sets] for word in ("--set", pair)]
    for said in (config("8xH100", "--yes", *words), config("8xH100", "--yes", "--set", "seed=2")):
        shown = said.partition("easymp.toml\n")[2].partition("\n\n")[0].splitlines()
        assert 0 < len(shown) <= 10 and not any("#" in line for line in shown)
    config("T4", "--yes", "--file", "new.toml", *words)
    assert "# here: auto is" in FILE.read_text()


SCALER = {
    name: value
    for value, name in enumerate("growth_delay min_scale hysteresis init_scale max_scale".split(), 1)
}


MACHINES_IN_WORDS = [
    ("8xH100", r"processes +8 \(one a GPU\)", "bf16", {}),
    ("2x8xA100-80GB", r"processes +16 on 2 nodes", "bf16", {"nodes": "2"}),
    ("64x80GB", r"processes +64 on 8 nodes", "bf16", {"nodes": "8"}),
    ("V100", r"processes +1 ", "fp16", {}),
    ("4xcpu", r"processes +4 ", "fp32", {"processes": 4}),
]


@pytest.mark.parametrize(("text", "processes", "precision", "launch"), MACHINES_IN_WORDS)
def test_a_plan_for_another_machine(text, processes, precision, launch, config):
    said = config("laptop CPU", "--yes", "--for", text)
    assert re.search(processes, said) and re.search(rf"^precision +{precision} ", said, re.M)
    assert (
        "\nnot known " in said and "srun" not in said and f"Next, on {text}, with a copy of the file" in said
    )
    assert launching() == launch and resolve().mixed_precision == "auto"
    config("laptop CPU", "--yes", "--for", text, "--set", "strategy=fsdp", code=int(text == "V100"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--for 8xH101", "'H101' is not a GPU that easymp knows, did you mean 'H100'?"),
        ("--for 8xH100 --measure", "--measure times this machine, and --for names another one"),
        ("--for V100 --set mixed_precision=bf16", "NVIDIA V100 (sm_70) has no bf16 units"),
    ],
)
def test_machines_that_are_refused(words, said, config):
    assert said in config("laptop CPU", "--yes", *words.split(), code=1)
    assert not FILE.exists()


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ("precision=bf16", "'precision' is not a setting, did you mean 'mixed_precision'? Known:"),
        ("seed", "there is no value; write --set seed=VALUE"),
        ("seed=x", "--set seed=x: 'x' is not a whole number"),
        ("nodes=x", "nodes='x' is not a number of nodes"),
        ("=", "'' is not a setting. Known"),
        ("project_dir=a\x1b[2Jb", "holds characters that a terminal does not show"),
    ],
)
def test_a_wrong_word_ahead_is_wrong_usage(pair, words, config):
    assert words in config("T4", "--yes", "--set", pair, code=2)


def test_what_was_said_ahead_and_is_impossible(config, talk):
    said = config("T4", "--yes", "--set", "mixed_precision=bf16", code=1)
    assert "--set: mixed_precision = bf16 cannot run here: Tesla T4 (sm_75) has no bf16 units" in said
    assert "or pass --set mixed_precision=auto" in said and not FILE.exists()
    said = talk("T4", words="--set mixed_precision=bf16")
    assert "cannot run here" in said and "mixed_precision" in asked(said)


def test_the_next_command(config, monkeypatch):
    Path("some where").mkdir()
    said = config("8xH100", "--yes", "--file", "some where/my.toml")
    assert said.endswith("  EASYMP_CONFIG='some where/my.toml' easymp launch train.py\n")
    said = config("8xH100", "--yes", "--set", "nodes=2:4")
    assert "On each of the 2 to 4 machines" in said and "easymp launch --main-address " in said
    monkeypatch.setenv("EASYMP_CONFIG", "other.toml")  # not there yet
    monkeypatch.setenv("EASYMP_MIXED_PRECISION", "fp32")
    said = config("T4", "--yes")
    assert Path("other.toml").exists() and "\n  python train.py\n" in said
    assert "EASYMP_MIXED_PRECISION in the environment wins over the file" in said
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert "\n  srun easymp launch train.py\n" in config("A100", "--yes")


CHOICES = {f.name: f.metadata.get("choices") for f in fields(Settings)}
ANSWERS = st.fixed_dictionaries(
    {},
    optional={
        "processes": st.sampled_from(["auto", "1", "2", "7", "8"]),
        "nodes": st.sampled_from(["auto", "1", "2", "1:2", "3:9"]),
        "mixed_precision": st.sampled_from(CHOICES["mixed_precision"]),
        "strategy": st.sampled_from(CHOICES["strategy"]),
        "gradient_accumulation_steps": st.integers(1, 99).map(str),
        "project_dir": st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=9).map(
            "runs/".__add__
        ),
    },
)


@hypothesis_settings(max_examples=60)
@given(name=st.sampled_from([*MACHINES]), answers=ANSWERS)
def test_the_file_reads_as_what_was_asked_or_nothing_is_written(name, answers, folder, on_machine):
    FILE.unlink(missing_ok=True)
    on_machine(name)
    words = [word for key, value in answers.items() for word in ("--set", f"{key}={value}")]
    done = main(["config", "--yes", *words])
    assert FILE.exists() == (done == 0) and done in (0, 1)
    if done == 0:
        wanted = {k: answers.pop(k) for k in ("processes", "nodes") if k in answers}
        assert resolve() == Settings(**answers)
        assert {k: str(v) for k, v in launching().items()} == {k: v for k, v in wanted.items() if v != "auto"}


def test_what_needs_a_library_says_how_to_install_it(config, talk, monkeypatch):
    for name in ("questionary", "shtab"):
        monkeypatch.setitem(sys.modules, name, None)
    config("T4", "--yes")
    config("T4", "--yes", "--set", "nodes=2")
    assert "pip install 'easymp[cli]'" in talk("T4", code=1)
    assert main(["completion", "bash"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ctrl-c", "ctrl-d", "sigterm"])
def test_ways_out_leave_the_terminal_as_it_was(folder, way):
    """In a terminal of its own, and without accelerators: questions depend on the machine."""
    environment = {n: v for n, v in os.environ.items() if n not in ("COLUMNS", "LINES")}
    environment |= {"TERM": "xterm", "CUDA_VISIBLE_DEVICES": ""}
    options = {"encoding": "utf-8", "timeout": 100, "dimensions": (40, 80), "env": environment}
    child = pexpect.spawn(sys.executable, ["-m", "easymp", "config"], **options)
    try:
        child.expect(r"processes \[.*\]:")
        if way == "sigterm":
            child.kill(signal.SIGTERM)
        else:
            child.sendcontrol(way[-1])
        child.expect("Nothing was written")
        modes = termios.tcgetattr(child.child_fd)[3]
        assert modes & termios.ECHO and modes & termios.ICANON
        child.expect(pexpect.EOF)
        assert child.wait() == 130
    finally:
        child.close(force=True)
    assert not any(Path().iterdir())
