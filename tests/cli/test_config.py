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


def launching() -> dict[str, Any]:
    """The table of `easymp launch` in the file that was written."""
    return tomllib.loads(FILE.read_text()).get("launch", {})


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


def test_what_was_announced_answered_or_wanted_opens_questions(talk, monkeypatch):
    assert asked(talk("GTX 1660", words="--all --file all.toml")) == list(TITLES.values())
    assert asked(talk("laptop CPU", "2")) == [*CPU[:2], "strategy", *ALWAYS]
    assert launching() == {"processes": 2}
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    said = talk("A100", words="--file nodes.toml")
    assert asked(said) == ["nodes", "mixed_precision", "strategy", *ALWAYS]
    assert "auto is 2 (SLURM_JOB_NUM_NODES in the environment)" in said


def test_what_was_answered_ahead_is_not_asked_unless_it_is_impossible(talk):
    said = talk("T4", words="--set mixed_precision=bf16 --file other.toml")
    assert "cannot run here" in said and "mixed_precision" in asked(said)
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
    taken = {"mixed_precision": "bf16", "strategy": "fsdp", "gradient_accumulation_steps": 3}
    assert resolve() == resolve(**taken, project_dir="runs")
    assert launching() == {"processes": 4, "nodes": "2"}
    FILE.unlink()
    talk("2xA100 NVLink", "", "", "\x1b[B", "\x1b[B\x1b[B\x1b[A")  # arrow keys pass over what is impossible
    assert (resolve().mixed_precision, resolve().strategy) == ("fp32", "ddp")
    FILE.unlink()
    talk("laptop CPU", "2", "", "ddp:", "back", "back:", "back:", "1")
    assert launching() == {"processes": 1}
    assert resolve().strategy == "auto"  # forgotten with the processes that needed it


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


def test_what_is_impossible_cannot_be_chosen_and_what_is_slow_is_said(talk):
    assert "has no bf16 units" in talk("T4", "bf16:")
    assert resolve().mixed_precision == "auto"
    slow = "This CPU has no bf16 instructions, so it is slower than fp32"
    assert slow in talk("laptop CPU", "", "bf16:", words="--file a.toml")
    assert "99 processes take turns on 8 thread(s)" in talk("laptop CPU", "99", words="--file b.toml")
    assert "On one node it needs shard_size" in talk("8xH100", "", "", "", "hsdp:", words="--file c.toml")


def test_leaving_at_any_prompt_or_a_no_at_the_end_writes_nothing(talk):
    for number in (0, 3, 6):
        assert "Nothing was written" in talk("8xH100", *[""] * number, leave="\x03", code=130)
    talk("T4", "", "", "", "\x1b[B", code=130)  # down, to "no"
    assert not any(Path().iterdir())


@pytest.mark.slow
def test_a_measurement_is_said_and_kept_as_the_reason(talk):
    said = talk("laptop CPU", "", "fp32:", words="--measure")
    assert "measured on cpu in" in said and "tf32 was left out: " in said
    assert re.search(r"^mixed_precision = \"fp32\".*timed here: ", FILE.read_text(), re.M)


def test_without_a_terminal_or_a_library_it_says_what_to_do(config, talk, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", None)  # closed; pytest's own may be a terminal
        said = config("laptop CPU", "--set", "processes=2", code=2)
    assert "not a terminal" in said and "Pass --yes" in said and "--dry-run" in said
    assert not FILE.exists()
    for name in ("questionary", "shtab"):
        monkeypatch.setitem(sys.modules, name, None)
    config("T4", "--yes")
    config("T4", "--yes", "--set", "nodes=2")
    assert "pip install 'easymp[cli]'" in talk("T4", code=1)
    assert main(["completion", "bash"]) == 1


def test_dry_run_writes_nothing(config, talk):
    for said in (config("8xH100", "--yes", "--dry-run"), talk("8xH100", words="--dry-run")):
        assert '\neasymp.toml\nmixed_precision = "auto"\nstrategy = "auto"\n' in said
        assert "Nothing is written, as --dry-run asks" in said
        assert not any(Path().iterdir())


def test_ten_lines_of_the_file_are_shown_and_its_comments_are_in_it(config):
    names = "growth_delay min_scale hysteresis init_scale max_scale".split()
    sets = ["seed=1", *(f"scaler_options.{name}={value}" for value, name in enumerate(names, 1))]
    words = [word for pair in sets for word in ("--set", pair)]
    for said in (config("8xH100", "--yes", *words), config("8xH100", "--yes", "--set", "seed=2")):
        shown = said.partition("easymp.toml\n")[2].partition("\n\n")[0].splitlines()
        assert 0 < len(shown) <= 10 and not any("#" in line for line in shown)
    assert "# here: auto is" in FILE.read_text()


def test_a_plan_for_another_machine(config):
    for text, processes, precision, launch in (
        ("8xH100", r"processes +8 \(one a GPU\)", "bf16", {}),
        ("2x8xA100-80GB", r"processes +16 on 2 nodes", "bf16", {"nodes": "2"}),
        ("V100", r"processes +1 ", "fp16", {}),
        ("4xcpu", r"processes +4 ", "fp32", {"processes": 4}),
    ):
        FILE.unlink(missing_ok=True)
        said = config("laptop CPU", "--yes", "--for", text)
        assert re.search(processes, said) and re.search(rf"^precision +{precision} ", said, re.M)
        assert "\nnot known " in said and "srun" not in said
        assert f"Next, on {text}, with a copy of the file" in said
        assert launching() == launch and resolve().mixed_precision == "auto"
        config("laptop CPU", "--yes", "--for", text, "--set", "strategy=fsdp", code=int(text == "V100"))


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--for 8xH101", 1, "'H101' is not a GPU that easymp knows, did you mean 'H100'?"),
        ("--for 8xH100 --measure", 1, "--measure times this machine, and --for names another one"),
        ("--for V100 --set mixed_precision=bf16", 1, "NVIDIA V100-16GB (sm_70) has no bf16 units"),
        ("--set mixed_precision=bf16", 1, "--set: mixed_precision = bf16 cannot run here: Tesla T4 (sm_75) has no"),
        ("--set mixed_precision=bf16", 1, "or pass --set mixed_precision=auto"),
        ("--set precision=bf16", 2, "'precision' is not a setting, did you mean 'mixed_precision'? Known:"),
        ("--set seed", 2, "there is no value; write --set seed=VALUE"),
        ("--set seed=x", 2, "--set seed=x: 'x' is not a whole number"),
        ("--set nodes=x", 2, "nodes='x' is not a number of nodes"),
        ("--set =", 2, "'' is not a setting. Known"),
        ("--set project_dir=a\x1b[2Jb", 2, "holds characters that a terminal does not show"),
        ("--set strategy_options.dimm=1", 1, "strategy 'ddp' has no option 'dimm', did you mean 'dim'?"),
        ("--set scaler_options.init_scale=x", 1, "init_scale='x' is not a number"),
        ("--set compile.what=all", 1, "what='all' is none of 'model', 'blocks'"),
        ("--set dataloader_config={split_batches=2}", 1, "split_batches=2 is neither True nor False"),
    ],
)  # fmt: skip
def test_wrong_words_are_refused(words, code, said, config):
    machine = "8xH100" if "." in words or "{" in words else "T4"
    assert said in config(machine, "--yes", *words.split(), code=code)
    assert not FILE.exists()


def test_the_next_command(config, monkeypatch):
    Path("some where").mkdir()
    said = config("8xH100", "--yes", "--file", "some where/my.toml")
    assert said.endswith("  EASYMP_CONFIG='some where/my.toml' easymp launch train.py\n")
    said = config("8xH100", "--yes", "--set", "nodes=2:4")
    assert "On each of the 2 to 4 machines" in said and "easymp launch --main-address " in said
    FILE.unlink()
    said = config("laptop CPU", "--yes", "--set", "processes=2", "--set", "strategy=zero1")
    assert said.endswith("\nNext\n  easymp launch train.py\n") and "\x1b" not in said
    assert resolve() == resolve(strategy="zero1") and launching() == {"processes": 2}
    monkeypatch.setenv("EASYMP_CONFIG", "other.toml")  # not there yet
    monkeypatch.setenv("EASYMP_MIXED_PRECISION", "fp32")
    said = config("T4", "--yes")
    assert Path("other.toml").exists() and "\n  python train.py\n" in said
    assert "EASYMP_MIXED_PRECISION in the environment wins over the file" in said
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert "\n  srun easymp launch train.py\n" in config("A100", "--yes")


CHOICES = {f.name: f.metadata.get("choices") for f in fields(Settings)}
LETTERS = st.characters(exclude_categories=["C", "Z"])
ANSWERS = st.fixed_dictionaries(
    {},
    optional={
        "processes": st.sampled_from(["auto", "1", "2", "7", "8"]),
        "nodes": st.sampled_from(["auto", "1", "2", "1:2", "3:9"]),
        "mixed_precision": st.sampled_from(CHOICES["mixed_precision"]),
        "strategy": st.sampled_from(CHOICES["strategy"]),
        "gradient_accumulation_steps": st.integers(1, 99).map(str),
        "project_dir": st.text(LETTERS, min_size=1, max_size=9).map("runs/".__add__),
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


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ctrl-c", "sigterm"])
def test_ways_out_leave_the_terminal_as_it_was(folder, way):
    """In a terminal of its own, and without accelerators: questions depend on the machine."""
    environment = {n: v for n, v in os.environ.items() if n not in ("COLUMNS", "LINES")}
    environment |= {"TERM": "xterm", "CUDA_VISIBLE_DEVICES": ""}
    options = {"encoding": "utf-8", "timeout": 100, "dimensions": (40, 80), "env": environment}
    child = pexpect.spawn(sys.executable, ["-m", "easymp", "config"], **options)
    try:
        child.expect(r"processes \[.*\]:")
        child.kill(signal.SIGTERM) if way == "sigterm" else child.sendcontrol("c")
        child.expect("Nothing was written")
        modes = termios.tcgetattr(child.child_fd)[3]
        assert modes & termios.ECHO and modes & termios.ICANON
        child.expect(pexpect.EOF)
        assert child.wait() == 130
    finally:
        child.close(force=True)
    assert not any(Path().iterdir())
