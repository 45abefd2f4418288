"""``easymp config``.

Which questions are asked on which machine, how answers are checked, and which settings the file gets.
"""

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

pexpect = pytest.importorskip("pexpect", reason="an optional package is not installed: pexpect (of the group test)")
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
    """The table of `easymp launch` in the file."""
    return tomllib.loads(FILE.read_text()).get("launch", {})


def questions(output: str) -> list[str]:
    """Names of the questions in an output."""
    return [TITLES[line] for line in output.splitlines() if line in TITLES]


# A machine for each list of questions where all defaults are taken; the precision and the processes proposed.
# test_plan.py has the precision of every machine.
PROPOSALS = {
    "P100": (ONE_DEVICE, "fp32", "1"),
    "T4": (ONE_DEVICE, "fp16", "1"),
    "GTX 1660": (ALWAYS, "fp32", "1"),  # nothing but fp32 runs there
    "A100": (ONE_DEVICE, "bf16", "1"),
    "8xH100": (SEVERAL, "bf16", "8"),
    "laptop CPU": (CPU, "fp32", "1"),
    "Sapphire Rapids": (CPU, "bf16", "1"),
}


@pytest.mark.parametrize("name", PROPOSALS)
def test_only_questions_that_change_something_here_are_asked(name, talk):
    names, precision, processes = PROPOSALS[name]
    output = talk(name)
    assert questions(output) == names
    assert re.search(rf"^precision +{precision} \(\S", output, re.M)
    assert re.search(rf"^processes +{processes} \(", output, re.M)
    assert launching() == {}
    assert (resolve().mixed_precision, resolve().strategy) == ("auto", "auto")


def test_announcements_answers_and_flags_open_and_close_questions(talk, monkeypatch):
    assert questions(talk("laptop CPU", "2")) == [*CPU[:2], "strategy", *ALWAYS]
    assert launching() == {"processes": 2}
    FILE.unlink()
    output = talk("T4", arguments="--set mixed_precision=bf16 --file other.toml")
    assert "cannot run here" in output and "mixed_precision" in questions(output)
    arguments = "--set strategy=fsdp --set processes=4 --set seed=7 --set memory=60GiB"
    assert questions(talk("8xH100", arguments=arguments)) == ["nodes", "mixed_precision", *ALWAYS]
    assert resolve() == resolve(strategy="fsdp", seed=7, memory="60GiB")
    assert launching() == {"processes": 4}
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    output = talk("A100", arguments="--file nodes.toml")
    assert questions(output) == ["nodes", "mixed_precision", "strategy", *ALWAYS]
    assert "auto is 2 (SLURM_JOB_NUM_NODES in the environment)" in output


def test_answers_reach_the_file_and_arrow_keys_pass_over_what_is_impossible(talk):
    output = talk("8xH100", "4", "2", "bf16:", "fsdp:", "3", "runs")
    assert questions(output) == SEVERAL
    expected = resolve(mixed_precision="bf16", strategy="fsdp", gradient_accumulation_steps=3, project_dir="runs")
    assert resolve() == expected
    assert launching() == {"processes": 4, "nodes": "2"}
    FILE.unlink()
    talk("2xA100 NVLink", "", "", "\x1b[B", "\x1b[B\x1b[B\x1b[A")
    assert (resolve().mixed_precision, resolve().strategy) == ("fp32", "ddp")


@pytest.mark.parametrize(
    ("machine", "answers", "wrong", "setting", "value"),
    [
        ("2xRTX 3090", [], ["3", "0", "two"], "processes", 1),
        ("2xRTX 3090", [""], ["0", "4:2", "many"], "nodes", "2"),
        ("laptop CPU", ["", ""], ["0", "1.5"], "gradient_accumulation_steps", 2),
        ("laptop CPU", ["", "", ""], ["file/runs", "s4://bucket"], "project_dir", "logs"),
    ],
)
def test_a_wrong_answer_is_refused(machine, answers, wrong, setting, value, talk):
    Path("file").touch()
    talk(machine, *answers, f"\r{CLEAR}".join([*wrong, str(value)]))
    assert {**vars(resolve()), **launching()}[setting] == value


def test_an_impossible_choice_is_refused_and_a_slow_one_has_a_note(talk):
    assert "has no bf16 units" in talk("T4", "bf16:")
    assert resolve().mixed_precision == "auto"
    note = "this CPU has no bf16 instructions, so it is slower than fp32"
    assert note in talk("laptop CPU", "", "bf16:", arguments="--file a.toml")
    assert "They share 8 threads" in talk("laptop CPU", "99", arguments="--file b.toml")


def test_an_interrupt_or_a_no_at_the_end_writes_nothing(talk):
    for number in (0, 3, 6):
        assert "Nothing was written" in talk("8xH100", *[""] * number, last_key="\x03", code=130)
    talk("T4", "", "", "", "\x1b[B", code=130)  # down, to "no"
    assert not any(Path().iterdir())


def test_without_a_terminal_or_a_library_a_remedy_is_named(config, talk, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", None)  # closed; pytest's own may be a terminal
        output = config("laptop CPU", "--set", "processes=2", code=2)
    assert "not a terminal" in output and "Pass --yes" in output and "--dry-run" in output
    assert not FILE.exists()
    for name in ("questionary", "shtab"):
        monkeypatch.setitem(sys.modules, name, None)
    config("T4", "--yes")
    config("T4", "--yes", "--set", "nodes=2")
    assert "pip install 'easymp[cli]'" in talk("T4", code=2)
    assert main(["completion", "bash"]) == 2
    monkeypatch.setitem(sys.modules, "tomlkit", None)  # which edits an existing file
    output = config("T4", "--yes", "--set", "nodes=3", code=2)
    assert "tomlkit is not installed: pip install 'easymp[cli]'" in output


def test_dry_run_writes_nothing(config, talk):
    for output in (config("8xH100", "--yes", "--dry-run"), talk("8xH100", arguments="--dry-run")):
        assert '\neasymp.toml\nmixed_precision = "auto"\nstrategy = "auto"\n' in output
        assert "Nothing is written, as --dry-run asks" in output
        assert not any(Path().iterdir())


def test_ten_lines_of_the_file_are_shown_and_its_comments_are_in_it(config):
    names = "growth_delay min_scale hysteresis init_scale max_scale".split()
    pairs = ["seed=1", *(f"scaler_options.{name}={value}" for value, name in enumerate(names, 1))]
    arguments = [argument for pair in pairs for argument in ("--set", pair)]
    for output in (config("8xH100", "--yes", *arguments), config("8xH100", "--yes", "--set", "seed=2")):
        lines = output.partition("easymp.toml\n")[2].partition("\n\n")[0].splitlines()
        assert 0 < len(lines) <= 10 and not any("#" in line for line in lines)
    assert "# here: auto is" in FILE.read_text()


def test_a_plan_for_another_machine(config):
    for machine, processes, precision, launch in (
        ("8xH100", r"processes +8 \(one a GPU\)", "bf16", {}),
        ("2x8xA100-80GB", r"processes +16 on 2 nodes", "bf16", {"nodes": "2"}),
        ("V100", r"processes +1 ", "fp16", {}),
        ("4xcpu", r"processes +4 ", "fp32", {"processes": 4}),
    ):
        FILE.unlink(missing_ok=True)
        output = config("laptop CPU", "--yes", "--for", machine)
        assert re.search(processes, output) and re.search(rf"^precision +{precision} ", output, re.M)
        assert "\nnot known " in output and "srun" not in output
        assert f"Next, on {machine}, with a copy of the file" in output
        assert launching() == launch and resolve().mixed_precision == "auto"
        config("laptop CPU", "--yes", "--for", machine, "--set", "strategy=fsdp", code=2 * (machine == "V100"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--for 8xH101", "'H101' is not a GPU that easymp knows, did you mean 'H100'?"),
        ("--for V100 --set mixed_precision=bf16", "NVIDIA V100-16GB (sm_70) has no bf16 units"),
        ("--set mixed_precision=bf16", "--set: mixed_precision = bf16 cannot run here: Tesla T4 (sm_75) has no"),
        ("--set mixed_precision=bf16", "or pass --set mixed_precision=auto, or --for MACHINE"),
        ("--set precision=bf16", "'precision' is not a setting, did you mean 'mixed_precision'? Known:"),
        ("--set seed", "there is no value; write --set seed=VALUE"),
        ("--set seed=x", "--set seed=x: 'x' is not a whole number"),
        ("--set nodes=x", "nodes='x' is not a number of nodes"),
        ("--set project_dir=s4://bucket", "s4://bucket: fsspec knows no protocol 's4'"),
        ("--set =", "'' is not a setting. Known"),
        ("--set strategy_options.dimm=1", "strategy 'ddp' has no option 'dimm', did you mean 'dim'?"),
        ("--set scaler_options.init_scale=x", "init_scale='x' is not a finite number above 0"),
        ("--set compile.what=all", "what='all' is none of 'model', 'blocks'"),
        ("--set dataloader_config={split_batches=2}", "split_batches=2 is neither True nor False"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(arguments, sentence, config):
    machine = "8xH100" if "." in arguments or "{" in arguments else "T4"
    assert sentence in config(machine, "--yes", *arguments.split(), code=2)
    assert not FILE.exists()


def test_the_next_command(config, monkeypatch):
    Path("some where").mkdir()
    output = config("8xH100", "--yes", "--file", "some where/my.toml")
    assert output.endswith("  EASYMP_CONFIG='some where/my.toml' easymp launch train.py\n")
    output = config("8xH100", "--yes", "--set", "nodes=2:4")
    assert "On each of the 2 to 4 machines" in output and "easymp launch --main-address " in output
    FILE.unlink()
    output = config("laptop CPU", "--yes", "--set", "processes=2", "--set", "strategy=zero1")
    assert output.endswith("\nNext\n  easymp launch train.py\n") and "\x1b" not in output
    assert resolve() == resolve(strategy="zero1") and launching() == {"processes": 2}
    monkeypatch.setenv("EASYMP_CONFIG", "other.toml")  # not there yet
    monkeypatch.setenv("EASYMP_MIXED_PRECISION", "fp32")
    output = config("T4", "--yes")
    assert Path("other.toml").exists() and "\n  python train.py\n" in output
    assert "EASYMP_MIXED_PRECISION in the environment wins over the file" in output
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
def test_the_file_holds_the_answers_or_nothing_is_written(name, answers, folder, on_machine):
    FILE.unlink(missing_ok=True)
    on_machine(name)
    code = main(["config", "--yes", *(f"--set={key}={value}" for key, value in answers.items())])
    assert FILE.exists() == (code == 0) and code in (0, 2)
    if code == 0:
        launch = {name: answers.pop(name) for name in ("processes", "nodes") if name in answers}
        assert resolve() == Settings(**answers)
        assert {k: str(v) for k, v in launching().items()} == {k: v for k, v in launch.items() if v != "auto"}


@pytest.mark.slow
@pytest.mark.parametrize("interrupt", ["ctrl-c", "sigterm"])
def test_an_interrupt_leaves_the_terminal_as_it_was(folder, interrupt):
    """In a terminal of its own, and without accelerators: questions depend on the machine."""
    environment = {n: v for n, v in os.environ.items() if n not in ("COLUMNS", "LINES")}
    environment |= {"TERM": "xterm", "CUDA_VISIBLE_DEVICES": ""}
    options = {"encoding": "utf-8", "timeout": 100, "dimensions": (40, 80), "env": environment}
    child = pexpect.spawn(sys.executable, ["-m", "easymp", "config"], **options)
    try:
        child.expect(r"processes \[.*\]:")
        child.kill(signal.SIGTERM) if interrupt == "sigterm" else child.sendcontrol("c")
        child.expect("Nothing was written")
        modes = termios.tcgetattr(child.child_fd)[3]
        assert modes & termios.ECHO and modes & termios.ICANON
        child.expect(pexpect.EOF)
        assert child.wait() == 130
    finally:
        child.close(force=True)
    assert not any(Path().iterdir())
