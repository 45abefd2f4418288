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
from easymp import CheckpointError, RefusedError, __version__
from easymp.errors import NoCheckpointError, nearest


def test_help_lists_every_command(capsys):
    assert cli.main(["--help"]) == 0
    output = capsys.readouterr().out
    for name, summary in cli.COMMANDS.items():
        assert f"{name} " in output and summary in output


GOOD = {"--help": "commands:", "checkpoint --help": "verify", "completion bash": "complete -o "}
WRONG_USAGE = {
    "": "usage",
    "--nonsense": "unrecognized arguments: --nonsense",
    "typo": "there is no command 'typo'. Known: launch, ",
    "lanch": "there is no command 'lanch', did you mean 'launch'? Known: launch, ",
    "launch": "required: SCRIPT",
    "launch --proceses 2 train.py": "unrecognized arguments: --proceses, did you mean '--processes'?",
    "launch --num_processes 2 train.py": "--num_processes, did you mean '--processes'?",
    "launch --nproc_per_node=2 train.py": "--nproc_per_node=2, did you mean '--processes'?",
    "launch --strategy fsdp train.py": "--strategy: write --set strategy=VALUE",
    "compare train.py --mixed_precision bf16": "did you mean '--precision'?",
    "launch nofile.py": "'nofile.py' is not a file: pass the script's path",
    "launch -m nomodule": "there is no module 'nomodule'",
    "launch --slurm print train.py": "--slurm: it was removed. Instead: sbatch a script as in the guide to Slurm",
    "launch --no-numa train.py": "--no-numa: it was removed. Instead: torchrun --numa-binding=node",
    "launch --config nofile.toml train.py": "'nofile.toml' is not a file",
    "launch --config . train.py": "'.' is not a file",
    "launch --set sede=1 train.py": "--set sede=1: 'sede' is not a setting, did you mean 'seed'?",
    "test --processes 0": "below the smallest possible value, 1",
    "env nofile": "unrecognized arguments: nofile",
    "config --from nofile.json": "'nofile.json' is not a file",
    "config --from fifo": "'fifo' is not a file",
    "config --from .": "'.' is not a file",
    "compare nofile.py": "'nofile.py' is not a file",
    "compare missing1 missing2": "missing1, missing2: there is no such file or folder",
    "compare train.py --set sede=1": "--set sede=1: 'sede' is not a setting, did you mean 'seed'?",
    "compare --strategy zero3 -m json": "did you mean 'fsdp'",
    "compare train.py --repeets 3": "unrecognized arguments: --repeets 3, did you mean '--repeats'?",
    "compare train.py --plans": "--plans (the script's own",  # and no hint to --repeats
    "prove nofile.py": "'nofile.py' is not a file",
    "prove train.py --strategy dpd": "did you mean 'ddp'?",
    "prove train.py --set sede=1": "--set sede=1: 'sede' is not a setting, did you mean 'seed'?",
    "rehearse train.py --typo": "--typo (the script's own",  # and no hint to --for
    "rehearse nofile.py": "'nofile.py' is not a file",
    "replay nowhere --step 3": "'nowhere' is not a folder",
    "plot nowhere": "there is no such file or folder",
    "estimate nofile": "'nofile' is not a model",
    "estimate 0": "is not a number of parameters",
    "estimate 7B --precision bf61": "did you mean 'bf16'?",
    "estimate 7B --strategy fsp": "strategy 'fsp' is not one of single",
    "estimate 7B --processes two": "'two' is not a whole number",
    "completion tcsh": "invalid choice: 'tcsh'",
    "checkpoint list": "required: PATH",
    "checkpoint verfy x": "did you mean 'verify'?",
}
WRONG_AFTER_TORCH = {
    "launch --set strategy=ddp --set strategy_options.wrap=1 train.py": "no option 'wrap': it belongs to fsdp, hsdp",
    "env --for 8xH101": "did you mean 'H100'?",
    "config --yes --set sede=1": "--set sede=1: 'sede' is not a setting, did you mean 'seed'?",
    "replay . --step 3": "has no record of its script",
    "checkpoint list nowhere": "nowhere: there is no such file or folder",
    "checkpoint verify nowhere": "nowhere: there is no such file or folder",
    "checkpoint verify .": ": not a checkpoint",
    "checkpoint inspect .": ": not a checkpoint",
    "checkpoint diff . .": "`easymp prove --against` compares two runs",
    "rehearse train.py --precision bf61": "did you mean 'bf16'?",
    "checkpoint convert . out": ".: no weights",
}


def test_wrong_usage_of_every_command_is_2_and_named_before_torch_is_imported(folder):
    (folder / "train.py").touch()
    os.mkfifo(folder / "fifo")
    lines = {**GOOD, **WRONG_USAGE, **WRONG_AFTER_TORCH}
    assert {line.split(" ")[0] for line in WRONG_USAGE} >= set(cli.COMMANDS)
    code = f"""
import contextlib, io, json, sys
from easymp.cli import main
outcomes = {{}}
for line in {list(lines)!r}:
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.redirect_stderr(text):
        outcomes[line] = main(line.split()), text.getvalue(), "torch" in sys.modules
print(json.dumps(outcomes))
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    for line, (status, text, torch) in json.loads(process.stdout).items():
        assert status == (0 if line in GOOD else 2) and lines[line] in text, (line, text)
        assert not torch or line in WRONG_AFTER_TORCH, line


@pytest.mark.slow
@pytest.mark.parametrize("command", ["compare", "prove", "rehearse"])
def test_a_script_that_fails_is_a_verdict(command, folder, capsys):
    (folder / "fails.py").write_text("raise ValueError('on purpose')")
    assert cli.main([command, "fails.py"]) == 1
    assert "ValueError: on purpose" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("--proceses", ["--processes", "--for"], "'--processes'"),
        ("EASYMP_SEDE", ["EASYMP_SEED"], "'EASYMP_SEED'"),
        ("full", ["FULL_SHARD", "NO_SHARD"], "'FULL_SHARD'"),  # the beginning of a name
        ("zero3", ["ddp", "fsdp"], "'fsdp'"),  # what others call it
        ("--plans", ["--repeats", "--precision"], None),
        ("--typo", ["--for"], None),
        ("typo", ["plot", "auto"], None),
        ("EASYMP_X", ["EASYMP_CPU"], None),
    ],
)
def test_a_hint_is_near_or_there_is_none(name, known, hint):
    assert nearest(name, known) == (f", did you mean {hint}?" if hint else "")


def test_python_m_easymp():
    command = [sys.executable, "-m", "easymp", "--version"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert process.stdout == f"easymp {__version__}\n"


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
            return 7 + args.loud

    monkeypatch.setattr(cli.importlib, "import_module", lambda name, package: Command)
    assert (cli.main(["env"]), cli.main(["env", "--loud"])) == (7, 8)
    assert cli.main(["env", "--lou"]) == 2  # abbreviations would change their meaning with every new option
    capsys.readouterr()
    errors = {RefusedError("not here; there"): 2, CheckpointError("damaged"): 1, NoCheckpointError("none there"): 2}
    for error, code in {**errors, SystemExit(2): 2, KeyboardInterrupt(): 130}.items():
        Command.error = error
        assert cli.main(["env"]) == code
    assert capsys.readouterr().err == "".join(f"easymp: {error}\n" for error in errors)
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


def complete(shell: str, line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """What `shell` offers for the last word of `line`."""
    if shutil.which(shell) is None:
        pytest.skip(f"an optional package is not installed: the shell {shell}")
    file = folder / f"easymp.{shell}"
    if not file.exists():
        assert cli.main(["completion", shell]) == 0
        file.write_text(capsys.readouterr().out)
    arguments = " ".join(f"'{argument}'" for argument in line.split(" "))
    script = {"bash": BASH, "fish": FISH}[shell].format(file=file, words=arguments, line=line)
    process = subprocess.run(
        [shell, "--norc" if shell == "bash" else "-N", "-c", script], cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder)}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert process.stderr == ""
    offered = [answer.split("\t")[0].strip() for answer in process.stdout.splitlines()]
    return {argument for argument in offered if argument.startswith(line.split(" ")[-1])}


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_what_can_follow_is_offered(shell, tmp_path, capsys):
    pytest.importorskip("shtab", reason="an optional package is not installed: shtab (of the extra 'cli')")
    (tmp_path / "train.py").touch()
    assert complete(shell, "easymp la", tmp_path, capsys) == {"launch"}
    assert complete(shell, "easymp ", tmp_path, capsys) >= set(cli.COMMANDS)
    assert complete(shell, "easymp checkpoint ver", tmp_path, capsys) == {"verify"}
    assert complete(shell, "easymp checkpoint convert --max", tmp_path, capsys) == {"--max-shard-size"}
    assert "--processes" in complete(shell, "easymp launch --pro", tmp_path, capsys)
    assert complete(shell, "easymp completion ", tmp_path, capsys) >= {"bash", "fish", "zsh"}
    assert "--processes" not in complete(shell, "easymp env --", tmp_path, capsys)
    assert "train.py" in complete(shell, "easymp launch tr", tmp_path, capsys)


def test_every_command_and_flag_is_there(capsys):
    for shell in ("bash", "zsh", "fish"):
        assert cli.main(["completion", shell]) == 0
        text = capsys.readouterr().out
        assert all(name in text for name in cli.COMMANDS) and "max-shard-size" in text
