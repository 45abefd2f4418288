"""The command line's front: quick, helpful, and without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import easymp.cli as cli
from easymp.errors import RefusedError
from easymp.version import __version__


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


def test_help_lists_every_command_and_imports_no_torch():
    code = "import sys; from easymp.cli import main; r = main(['--help']); print('torch' in sys.modules, r)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True).stdout
    assert out.endswith("False 0\n")
    for name, words in cli.COMMANDS.items():
        assert f"{name} " in out
        assert words in out


def test_every_command_keeps_the_promise():
    for name in cli.COMMANDS:
        module = cli.importlib.import_module(f"easymp.cli.{name}")
        assert module.__doc__
        assert callable(module.arguments)
        assert callable(module.run)


def test_python_m_easymp():
    done = subprocess.run([sys.executable, "-m", "easymp", "--version"], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == f"easymp {__version__}\n"


@pytest.mark.parametrize("words", [[], ["--nonsense"], ["lanch"], ["launch"], ["launch", "--proceses", "2", "x.py"]])
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
