"""Run a training again from a checkpoint, bit for bit, and stop in front of an update.

RUN is the project's folder. Its script runs again from the newest checkpoint
before the update, on as many processes as the run had. It stops in front of
the optimizer's step, with the gradients there. Losses, gradient norms, the
loss scale and the place in the data of each update are compared with those
that the run kept (Accelerator(replay=64)). Nothing is written into RUN.

examples:
  easymp replay runs/digits --step 8123
  easymp replay runs/digits --step 8123 --nonfinite
  easymp replay runs/digits --step 8123 --hooks look.py
  easymp replay runs/digits --step 8123 --pdb
  easymp replay runs/digits --step 8123 -- train.py --lr 0.1

Words after -- are the script and its arguments, in place of the run's own.
look.py defines before_forward(acc, models), before_step(acc, models), or both.

Exit codes: 0 stopped there, and what could be compared is equal; 1 something
differs, the script failed, or an error; 2 the update never came, or wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ... import checkpoint, hardware
from ...base import env
from ...base.lazy import modules_at_first_use
from ...errors import SettingError
from ...launcher.entrypoints import check_script
from ...settings import OVERRIDE
from ..terminal import ended_by_signals

if TYPE_CHECKING:
    from ...checkpoint import ring

modules_at_first_use(globals(), ring="..checkpoint.ring")  # which imports torch

TASK, END = "task.json", "end.json"
SAME, DIFFERS, NOT_REACHED = CODES = ("same", "differs", "not reached")


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.usage = "easymp replay RUN --step N [OPTIONS] [-- SCRIPT ARGUMENTS]"
    add("run", metavar="RUN", help="the project's folder, with its checkpoints")
    add("--step", type=int, required=True, metavar="N", help="the update, from 1, in front of which to stop")
    add("--hooks", type=Path, metavar="FILE", help="a Python file with before_forward, before_step, or both")
    add("--pdb", action="store_true", help="open a debugger where the script calls the step")
    add("--nonfinite", action="store_true", help="name the first module with a number that is not finite")
    add("--processes", type=int, metavar="N", help="where nothing says how many the run had")
    add("--cpu", action="store_true", help="on processes of the CPU, which have other last bits than a GPU's")
    add("-m", "--module", action="store_true", help="SCRIPT is a module's name")


def reworded(words: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """Keep the words after ``--`` for the script."""
    cut = words.index("--") if "--" in words else len(words)
    parser.set_defaults(script=words[cut + 1 :])
    return words[:cut]


def run(args: argparse.Namespace) -> int:
    project = Path(args.run).absolute()
    if not project.is_dir():
        raise SettingError(f"{args.run!r} is not a folder: pass the project's, with its checkpoints")
    if args.step < 1:
        raise SettingError(f"--step {args.step}: updates count from 1")
    if args.hooks is not None and not args.hooks.is_file():
        raise SettingError(f"--hooks {str(args.hooks)!r} is not a file")
    begin = ring.read(ring.file_of(str(project), 0))[0] or {}
    if not args.script and not begin.get("script"):
        raise SettingError(f"{args.run} does not name its script: pass it, as in: -- train.py --lr 0.1")
    if args.module and not args.script:
        raise SettingError("-m is for a module's name after --")
    script, *words = args.script or [begin["script"], *begin["arguments"]]
    module = args.module if args.script else begin["module"]
    folder = begin.get("folder", "") if not args.script else ""
    folder = folder if os.path.isdir(folder) else os.getcwd()
    if not module:
        check_script(os.path.join(folder, script), module)
    start, there = newest(
        project / "checkpoints" if (project / "checkpoints").is_dir() else project, args.step
    )
    processes = begin.get("ranks") or args.processes or there or 1
    if args.processes not in (None, processes):
        raise SettingError(f"--processes {args.processes}: the run had {processes}, and replays on as many")
    device = "cpu" if args.cpu else begin.get("device", "cpu")
    found = hardware.detect()
    if device != "cpu" and (found.kind != device or len(found.devices) < processes):
        has = f"{len(found.devices)} of {found.kind}" if found.devices else "none"
        raise SettingError(
            f"the run had {processes} processes, each on a device of {device}, and this machine has {has}: replay it on one with as many, "
            "or pass --cpu, which computes other last bits"
        )
    if args.pdb and processes > 1:
        raise SettingError(f"--pdb with {processes} processes, which share one terminal: use --hooks")
    task = {
        "update": args.step, "checkpoint": start, "project": str(project), "module": module, "script": script, "arguments": words,
        "folder": folder, "hooks": args.hooks and str(args.hooks.absolute()), "pdb": args.pdb, "nonfinite": args.nonfinite, "begin": begin,
    }  # fmt: skip
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="easymp-replay-") as scratch:
        Path(scratch, TASK).write_text(json.dumps(task), encoding="utf-8")
        code = launch(scratch, processes, args.cpu, args.step, begin.get("variables"))
        end = Path(scratch, END)
        verdict = end.read_text(encoding="utf-8") if end.exists() else DIFFERS
    if code and verdict != NOT_REACHED:
        print(f"The replay failed (exit code {code}).")
        return 1
    return CODES.index(verdict)


def newest(root: str | os.PathLike[str], step: int) -> tuple[str | None, int | None]:
    """The newest checkpoint in a folder before an update, on the line that `resume` follows, and the processes that wrote it."""
    saved = [e for e in checkpoint.list_checkpoints(root) if e.committed and not e.abandoned]
    before = [e for e in saved if e.step is not None and e.step < step]
    if not before:
        return None, saved[-1].world_size if saved else None
    last = max(before, key=lambda e: (e.step, e.written or ""))
    return f"{os.fspath(root)}/{last.name}", last.world_size


def launch(scratch: str, processes: int, cpu: bool, step: int, variables: dict[str, str] | None) -> int:
    """Run the ranks to their end, with the run's own variables where they are known; returns the exit code."""
    settings = {"project_dir": scratch, "log_with": "none", "save_on_signal": "false", "replay": str(step)}
    settings |= {"cpu": "true"} if cpu else {}
    module = "easymp.cli.replay.rank"
    several = ["easymp", "launch", "--processes", str(processes), "-m", module]
    command = [sys.executable, "-m", *(several if processes > 1 else [module]), scratch]
    own = dict.fromkeys(env.names(env.PREFIX)) if variables is not None else {}
    with env.override(**{**own, **(variables or {})}):
        words = [f"{name}={shlex.quote(word)}" for name, word in settings.items()]
        override = " ".join(filter(None, [env.read(OVERRIDE), *words]))
        process = subprocess.Popen(command, env=env.merged({OVERRIDE: override}))
    try:
        return process.wait()
    except KeyboardInterrupt:  # which the ranks get, too
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
