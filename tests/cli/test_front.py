"""The command line's front: quick, helpful, and without torch; and its completion."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import easymp.cli as cli
from easymp import RefusedError, __version__


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
    words = {"capture_output": True, "text": True, "timeout": 100, "check": True, "cwd": tmp_path}
    done = subprocess.run([sys.executable, "-c", code], **words)
    for line, (status, said, torch) in json.loads(done.stdout).items():
        wanted, words = WITHOUT_TORCH[line]
        assert (status, torch) == (wanted, False), (line, said)
        assert words in said, (line, said)


def test_python_m_easymp():
    command = [sys.executable, "-m", "easymp", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == f"easymp {__version__}\n"


def test_wrong_usage_is_2_and_names_the_nearest(capsys):
    for words in ([], ["--nonsense"], ["launch"], ["launch", "--proceses", "2", "x.py"], ["lanch"]):
        assert cli.main(words) == 2
    assert "there is no command 'lanch', did you mean 'launch'? Known: launch, " in capsys.readouterr().err


def test_exit_codes_and_errors_are_the_commands(monkeypatch, capsys):
    class Command:
        """A word."""

        error = None

        @staticmethod
        def arguments(parser):
            parser.add_argument("--loud", action="store_true")

        @classmethod
        def run(cls, args):
            if cls.error:
                raise cls.error
            return 40 + args.loud

    monkeypatch.setattr(cli.importlib, "import_module", lambda name, package: Command)
    assert (cli.main(["env"]), cli.main(["env", "--loud"])) == (40, 41)
    assert cli.main(["env", "--lou"]) == 2  # abbreviations would change their meaning with every new option
    capsys.readouterr()
    Command.error = RefusedError("not here; there")
    assert cli.main(["env"]) == 1
    assert capsys.readouterr().err == "easymp: not here; there\n"
    Command.error = KeyboardInterrupt()
    assert cli.main(["env"]) == 130
    Command.error = KeyError("a bug")  # keeps its traceback
    with pytest.raises(KeyError):
        cli.main(["env"])


# -- completion, as the shells themselves do it -----------------------------------------------------------------------

BASH = """
source {file}
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=()
compopt() {{ :; }}
_shtab_easymp; printf '%s\\n' "${{COMPREPLY[@]}}"
"""
FISH = "source {file}; complete -C '{line}'"


def ask(shell: str, line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """What `shell` offers for the last word of `line`."""
    if shutil.which(shell) is None:
        pytest.skip(f"an optional package is not installed: the shell {shell}")
    file = folder / f"easymp.{shell}"
    if not file.exists():
        assert cli.main(["completion", shell]) == 0
        file.write_text(capsys.readouterr().out)
    words = " ".join(f"'{word}'" for word in line.split(" "))
    script = {"bash": BASH, "fish": FISH}[shell].format(file=file, words=words, line=line)
    done = subprocess.run(
        [shell, "--norc" if shell == "bash" else "-N", "-c", script], cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder)}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.stderr == ""
    offered = [answer.split("\t")[0].strip() for answer in done.stdout.splitlines()]
    return {word for word in offered if word.startswith(line.split(" ")[-1])}


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_what_can_follow_is_offered(shell, tmp_path, capsys):
    pytest.importorskip("shtab", reason="an optional package is not installed: shtab (of the extra 'cli')")
    (tmp_path / "train.py").touch()
    assert ask(shell, "easymp la", tmp_path, capsys) == {"launch"}
    assert ask(shell, "easymp ", tmp_path, capsys) >= set(cli.COMMANDS)
    assert ask(shell, "easymp checkpoint ver", tmp_path, capsys) == {"verify"}
    assert ask(shell, "easymp checkpoint merge --max", tmp_path, capsys) == {"--max-shard-size"}
    assert "--processes" in ask(shell, "easymp launch --pro", tmp_path, capsys)
    assert ask(shell, "easymp completion ", tmp_path, capsys) >= {"bash", "fish", "zsh"}
    assert "--processes" not in ask(shell, "easymp env --", tmp_path, capsys)
    assert "train.py" in ask(shell, "easymp launch tr", tmp_path, capsys)


def test_every_command_and_flag_is_there_and_other_shells_are_refused(capsys):
    for shell in ("bash", "zsh", "fish"):
        assert cli.main(["completion", shell]) == 0
        text = capsys.readouterr().out
        assert all(name in text for name in cli.COMMANDS) and "max-shard-size" in text
    assert cli.main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
