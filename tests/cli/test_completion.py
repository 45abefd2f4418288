"""Completion as the shells themselves do it, from the script that is printed."""

from __future__ import annotations

import shutil
import subprocess

import pytest

import easymp.cli as cli

BASH = """
source {file}
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=()
_easymp; printf '%s\\n' "${{COMPREPLY[@]}}"
"""
# What completes is zsh's own; how it is asked is written down, as no terminal is here.
ZSH = """
compdef() {{ :; }}
compadd() {{ shift; print -l -- "$@"; }}
_describe() {{ print -l -- "${{(@P)2}}"; }}
_files() {{ print -- FILES; }}
source {file}
words=({words}); CURRENT=${{#words}}
_easymp
"""
FISH = "source {file}; complete -C '{line}'"


def ask(shell: str, line: str, folder, capsys) -> list[str]:
    """What `shell` offers for the last word of `line`."""
    if shutil.which(shell) is None:
        pytest.skip(f"an optional package is not installed: the shell {shell}")
    assert cli.main(["completion", shell]) == 0
    file = folder / f"easymp.{shell}"
    file.write_text(capsys.readouterr().out)
    last = line.split(" ")[-1]
    words = " ".join(f"'{word}'" for word in line.split(" "))
    script = {"bash": BASH, "zsh": ZSH, "fish": FISH}[shell].format(file=file, words=words, line=line)
    done = subprocess.run(
        [shell, *(["--norc"] if shell == "bash" else ["-f"] if shell == "zsh" else ["-N"]), "-c", script],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder)},
    )
    assert done.stderr == ""
    offered = [answer.split("\t")[0].split(":")[0] for answer in done.stdout.splitlines()]
    return [word for word in offered if word.startswith(last)]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_what_can_follow_is_offered(shell, tmp_path, capsys):
    (tmp_path / "train.py").touch()
    assert ask(shell, "easymp la", tmp_path, capsys) == ["launch"]
    assert set(ask(shell, "easymp ", tmp_path, capsys)) >= set(cli.COMMANDS)
    assert ask(shell, "easymp checkpoint ver", tmp_path, capsys) == ["verify"]
    assert ask(shell, "easymp checkpoint merge --max", tmp_path, capsys) == ["--max-shard-size"]
    assert "--processes" in ask(shell, "easymp launch --pro", tmp_path, capsys)
    assert sorted(ask(shell, "easymp completion ", tmp_path, capsys))[-3:] == ["bash", "fish", "zsh"]
    assert "--processes" not in ask(shell, "easymp env --", tmp_path, capsys)


def test_every_command_and_flag_is_there(capsys):
    for shell in ("bash", "zsh", "fish"):
        assert cli.main(["completion", shell]) == 0
        text = capsys.readouterr().out
        for name in cli.COMMANDS:
            assert name in text
        assert "max-shard-size" in text
    assert cli.main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
