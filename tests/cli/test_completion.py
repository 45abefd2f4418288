"""Completion as the shells themselves do it, from the script that is printed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from easymp.cli import COMMANDS, main

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
        assert main(["completion", shell]) == 0
        file.write_text(capsys.readouterr().out)
    words = " ".join(f"'{word}'" for word in line.split(" "))
    script = {"bash": BASH, "fish": FISH}[shell].format(file=file, words=words, line=line)
    done = subprocess.run(
        [shell, "--norc" if shell == "bash" else "-N", "-c", script],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder)},
    )
    assert done.stderr == ""
    offered = [answer.split("\t")[0].strip() for answer in done.stdout.splitlines()]
    return {word for word in offered if word.startswith(line.split(" ")[-1])}


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_what_can_follow_is_offered(shell, tmp_path, capsys):
    pytest.importorskip("shtab", reason="an optional package is not installed: shtab (of the extra 'cli')")
    (tmp_path / "train.py").touch()
    assert ask(shell, "easymp la", tmp_path, capsys) == {"launch"}
    assert ask(shell, "easymp ", tmp_path, capsys) >= set(COMMANDS)
    assert ask(shell, "easymp checkpoint ver", tmp_path, capsys) == {"verify"}
    assert ask(shell, "easymp checkpoint merge --max", tmp_path, capsys) == {"--max-shard-size"}
    assert "--processes" in ask(shell, "easymp launch --pro", tmp_path, capsys)
    assert ask(shell, "easymp completion ", tmp_path, capsys) >= {"bash", "fish", "zsh"}
    assert "--processes" not in ask(shell, "easymp env --", tmp_path, capsys)
    assert "train.py" in ask(shell, "easymp launch tr", tmp_path, capsys)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_flag_is_there(shell, capsys):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS) and "max-shard-size" in text


def test_another_shell_is_wrong_usage(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
