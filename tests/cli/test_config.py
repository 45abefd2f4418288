"""``easymp config`` as a person meets it: in a real terminal, and where there is none."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from easymp.base import env
from easymp.cli import main
from easymp.settings import Launching, resolve, resolve_launching

pexpect = pytest.importorskip(
    "pexpect", reason="an optional package is not installed: pexpect (of the extra 'test')"
)

PROMPT = r"\]: "
FILE = Path("easymp.toml")
# On any machine: what is asked of it depends on it, so these tests pretend that there is no accelerator.
QUESTIONS = ("processes", "mixed_precision", "gradient_accumulation_steps", "project_dir", "yes, no or back")


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (*env.names(env.PREFIX), *env.names("SLURM_")):
        monkeypatch.delenv(name)


@pytest.fixture
def terminal() -> Iterator[Starter]:
    starter = Starter()
    yield starter
    starter.close()


class Starter:
    """Starts `easymp config` in terminals of its own, and ends what is left."""

    def __init__(self) -> None:
        self._all: list[Child] = []

    def __call__(self, *words: str, columns: int = 80, dumb: bool = False, encoding: str = "utf-8") -> Child:
        child = Child(words, columns, dumb, encoding)
        self._all.append(child)
        return child

    def close(self) -> None:
        for child in self._all:
            if child.process.isalive():
                child.process.kill(signal.SIGKILL)
            child.wait()


class Child:
    def __init__(self, words: tuple[str, ...], columns: int, dumb: bool, encoding: str) -> None:
        self.heard = ""
        self.process = pexpect.spawn(
            sys.executable,
            ["-m", "easymp", "config", *words],
            encoding=encoding,
            timeout=100,
            dimensions=(40, columns),
            # COLUMNS, which the pool of the tests sets, would hide the terminal's own width.
            env={n: v for n, v in os.environ.items() if n not in ("COLUMNS", "LINES")}
            | {"TERM": "dumb" if dumb else "xterm", "CUDA_VISIBLE_DEVICES": ""},
        )

    def until(self, pattern: str) -> str:
        self.process.expect(pattern)
        self.heard += self.process.before + (
            self.process.after if isinstance(self.process.after, str) else ""
        )
        return self.process.before

    def answer(self, *words: str) -> None:
        """Each at the next prompt."""
        for word in words:
            self.until(PROMPT)
            self.process.sendline(word)

    def wait(self) -> None:
        """Until it is gone, which takes a busy machine longer than pexpect's own `close` has patience for."""
        if not self.process.closed:
            self.process.wait()
            self.process.close()

    def end(self) -> int:
        """To its end; the exit code, with 128 + n for signal n."""
        self.until(pexpect.EOF)
        self.wait()
        return (
            self.process.exitstatus if self.process.signalstatus is None else 128 + self.process.signalstatus
        )


# -- where there is no terminal ----------------------------------------------------------------------------------------


def test_without_a_terminal_it_says_what_to_pass(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # closed; pytest's own may be a terminal
    assert main(["config", "--set", "cpu=true", "--set", "processes=2"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert (
        "standard input is no terminal, so nobody can be asked.\nPass --yes to take what follows" in said.err
    )
    assert "--set mixed_precision=auto  " in said.err
    assert "--set strategy=auto  " in said.err
    assert "--set processes" not in said.err
    assert not FILE.exists()


def test_yes_takes_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["config", "--yes", "--set", "processes=2", "--set", "strategy=zero1", "--set", "cpu=true"]) == 0
    )
    said = capsys.readouterr().out
    assert said.endswith("\nNext\n  easymp launch train.py\n")
    assert "\x1b" not in said
    assert resolve() == resolve(strategy="zero1", cpu=True)
    assert resolve_launching() == Launching(processes=2)


def test_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--yes", "--dry-run"]) == 0
    assert "Nothing is written, as --dry-run asks" in capsys.readouterr().out
    assert not any(Path().iterdir())


def test_a_foreign_file_for_several_processes_is_taken_on_a_machine_that_starts_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("ds_config.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    words = ["config", "--yes", "--set", "cpu=true", "--from", "ds_config.json"]
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "strategy fsdp is for several processes, and here would be one: it is written for machines that start several"
        in said
    )
    assert "processes 2 (assumed)" in said
    assert said.endswith("easymp launch --processes 2 train.py")
    assert resolve().strategy == "fsdp" and resolve_launching().processes is None
    assert main([*words, "--set", "processes=1"]) == 1
    assert "strategy = fsdp cannot run here" in capsys.readouterr().err


def test_a_wrong_key_ahead_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--yes", "--set", "precision=bf16"]) == 2
    assert "'precision' is no setting, did you mean 'mixed_precision'? Known: " in capsys.readouterr().err


@pytest.mark.parametrize("command", [["config", "--yes"], ["env"]])
def test_a_wrong_key_in_the_file_has_its_line(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    FILE.write_text("seed = 1\nmixed_precison = 'bf16'\n")
    assert main(command) == 1
    err = capsys.readouterr().err
    assert err.startswith(
        "easymp: easymp.toml, line 2: 'mixed_precison' is no setting, did you mean 'mixed_precision'? Known: "
    )


def test_a_place_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--yes", "--file", "nowhere/easymp.toml"]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err.startswith("easymp: there is no folder ")) == ("", True)


# -- in a terminal -----------------------------------------------------------------------------------------------------


def test_a_person_goes_through_it(terminal: Starter) -> None:
    """Wrong answers, help, back, and at the end the file and the command; 40 columns wide, and none is passed."""
    child = terminal(columns=40, dumb=True)
    child.answer(
        "0", "2", "help", "bf61", "bf16", "back", "fp32", "single", "fsdp", "", "runs", "back", "logs", ""
    )
    assert child.end() == 0, child.heard
    for words in (
        "is below the smallest",
        "did you mean 'bf16'?",
        "'single' is for one",
        "easymp launch train.py",
    ):
        assert words in re.sub(r"\s+", " ", child.heard), child.heard
    told, _, file = child.heard.replace("\r", "").partition("# What this project asks")
    assert max(map(len, told.splitlines())) <= 40
    assert "\x1b" not in told
    assert resolve() == resolve(mixed_precision="fp32", strategy="fsdp", project_dir="logs")
    assert resolve_launching() == Launching(processes=2)
    assert file.count('\nstrategy = "fsdp"\n') == 2  # shown before and after going back


def leave(child: Child, way: str) -> None:
    if way == "sigterm":
        child.process.kill(signal.SIGTERM)
    elif way == "quit":
        child.process.sendline("quit")
    else:
        child.process.sendcontrol(way[-1])


def leaves(child: Child, question: int, way: str) -> None:
    """At the question of that number: nothing is written, and the terminal is as it was."""
    for number, name in enumerate(QUESTIONS):
        child.until(rf"{name} \[.*{PROMPT}")
        if number == question:
            break
        child.process.sendline("")
    leave(child, way)
    child.until("Nothing was written")
    settings = termios.tcgetattr(child.process.child_fd)
    assert settings[3] & termios.ECHO
    assert settings[3] & termios.ICANON
    assert child.end() == 130
    assert not any(Path().iterdir())


def test_ctrl_c_at_a_question(terminal: Starter) -> None:
    leaves(terminal(), 1, "ctrl-c")


@pytest.mark.slow
def test_ctrl_c_at_each_other_question(terminal: Starter) -> None:
    children = {question: terminal() for question in range(len(QUESTIONS)) if question != 1}
    for question, child in children.items():
        leaves(child, question, "ctrl-c")


@pytest.mark.slow
def test_other_ways_out(terminal: Starter) -> None:
    children = {way: terminal() for way in ("ctrl-d", "quit", "sigterm")}  # at once: each imports torch
    for question, (way, child) in enumerate(children.items(), 1):
        leaves(child, question, way)


@pytest.mark.slow
def test_an_existing_file_is_shown_as_a_difference_in_colours(terminal: Starter) -> None:
    FILE.write_text("# by hand\nseed = 3\nmixed_precision = 'fp32'\n")
    child = terminal()
    child.answer("", "bf16", "", "", "y")
    assert child.end() == 0
    assert "\x1b[31m-mixed_precision = 'fp32'\x1b[0m" in child.heard
    assert '\x1b[32m+mixed_precision = "bf16"\x1b[0m' in child.heard
    assert "The one before is easymp.toml.bak." in re.sub(r"\s+", " ", child.heard)
    assert FILE.read_text().startswith('# by hand\nseed = 3\nmixed_precision = "bf16"\n')


@pytest.mark.slow
def test_a_read_only_folder_is_said_before_the_questions(terminal: Starter) -> None:
    child = terminal("--file", "/proc/easymp.toml")  # where nobody can make a file, root neither
    assert child.end() == 1
    assert "easymp: /proc/easymp.toml cannot be written: " in child.heard
    assert "What is here" not in child.heard


@pytest.mark.slow
def test_text_of_another_encoding_is_a_wrong_answer(terminal: Starter) -> None:
    child = terminal(encoding="latin-1")
    child.answer("\xff\xfe", "", "", "", "", "")
    assert child.end() == 0, child.heard
    assert "is not a whole number" in child.heard


@pytest.mark.slow
def test_a_closed_standard_input() -> None:
    done = subprocess.run(
        ["sh", "-c", f"'{sys.executable}' -m easymp config <&-"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2
    assert "standard input is no terminal" in done.stderr
