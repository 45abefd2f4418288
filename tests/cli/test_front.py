"""The command line's front: quick, helpful, and without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import easymp.cli as cli
from easymp import RefusedError, __version__


@pytest.fixture
def command(monkeypatch):
    """Replaces the command ``env`` by one that does as told."""

    def set_up(run):
        class Command:
            """A word."""

            @staticmethod
            def arguments(parser):
                parser.add_argument("--loud", action="store_true")

        Command.run = staticmethod(run)
        monkeypatch.setattr(cli.importlib, "import_module", lambda name, package: Command)

    return set_up


def test_help_lists_every_command(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, words in cli.COMMANDS.items():
        assert f"{name} " in out and words in out


WITHOUT_TORCH = {
    "--help": (0, "commands:"),
    "checkpoint --help": (0, "verify"),
    "completion bash": (0, "complete -o "),
    "launch nofile.py": (1, "'nofile.py' is not a file: pass the script's path"),
    "launch --slurm print nofile.py": (1, "'nofile.py' is not a file"),
    "launch --config nofile.toml train.py": (1, "'nofile.toml' is not a file"),
    "launch --config . train.py": (1, "'.' is not a file"),
    "compare nofile.py": (1, "'nofile.py' is not a file"),
    "prove nofile.py": (1, "'nofile.py' is not a file"),
    "compare --strategy zero3 -m json": (1, "did you mean 'fsdp'?"),
    "estimate 7B --strategy fsp": (1, "strategy 'fsp' is not one of single"),
    "estimate 7B --precision bf61": (1, "did you mean 'bf16'?"),
    "estimate 7B --processes two": (1, "'two' is not a whole number"),
    "estimate nofile": (1, "'nofile' is not a model"),
    "estimate 0": (1, "is not a number of parameters"),
    "launch -m nomodule": (1, "there is no module 'nomodule'"),
    "checkpoint list": (2, "required: PLACE"),
    "env nofile": (2, "unrecognized arguments: nofile"),
    "test --processes 0": (1, "below the smallest possible value, 1"),
    "config --from nofile.json": (1, "'nofile.json' is not a file"),
    "config --from fifo": (1, "'fifo' is not a file"),
    "config --from .": (1, "'.' is not a file"),
}


def test_arguments_are_checked_before_torch_is_imported(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    code = f"""
import contextlib, io, json, sys
from easymp.cli import main
found = {{}}
for line in {list(WITHOUT_TORCH)!r}:
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        found[line] = main(line.split()), said.getvalue(), "torch" in sys.modules
print(json.dumps(found))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True, cwd=tmp_path
    )
    for line, (status, said, torch) in json.loads(done.stdout).items():
        wanted, words = WITHOUT_TORCH[line]
        assert (status, torch) == (wanted, False), (line, said)
        assert words in said, (line, said)


def test_python_m_easymp():
    done = subprocess.run(
        [sys.executable, "-m", "easymp", "--version"], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout == f"easymp {__version__}\n"


@pytest.mark.parametrize(
    "words", [[], ["--nonsense"], ["lanch"], ["launch"], ["launch", "--proceses", "2", "x.py"]]
)
def test_wrong_usage_is_2(words, capsys):
    assert cli.main(words) == 2
    capsys.readouterr()


def test_a_wrong_command_names_the_nearest(capsys):
    cli.main(["lanch"])
    assert "there is no command 'lanch', did you mean 'launch'? Known: launch, " in capsys.readouterr().err


def test_an_error_of_ours_is_one_sentence(command, capsys):
    def run(args):
        raise RefusedError("not here; there")

    command(run)
    assert cli.main(["env"]) == 1
    assert capsys.readouterr().err == "easymp: not here; there\n"


def test_other_errors_keep_their_traceback(command):
    def run(args):
        raise KeyError("a bug")

    command(run)
    with pytest.raises(KeyError):
        cli.main(["env"])


def test_ctrl_c_is_130(command):
    def run(args):
        raise KeyboardInterrupt

    command(run)
    assert cli.main(["env"]) == 130


def test_arguments_and_exit_code_are_the_commands(command):
    command(lambda args: 40 + args.loud)
    assert (cli.main(["env"]), cli.main(["env", "--loud"])) == (40, 41)
    assert cli.main(["env", "--lou"]) == 2  # abbreviations would change their meaning with every new option
