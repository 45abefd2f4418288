"""Run a training again from a checkpoint, bit for bit, and stop in front of an update.

RUN is the project's folder. Its script runs again from the newest checkpoint before the update, on as many processes as
the run had. It stops in front of the optimizer's step, with the gradients in memory. Losses, gradient norms, the loss
scale and the position in the data of each update are compared with those that the run kept (Settings(replay=64)).
Nothing is written into RUN.

examples:
  easymp replay runs/digits --step 8123
  easymp replay runs/digits --step 8123 --nonfinite
  easymp replay runs/digits --step 8123 --hooks look.py
  easymp replay runs/digits --step 8123 --pdb
  easymp replay runs/digits --step 8123 -- train.py --lr 0.1

Words after -- are the script and its arguments, in place of the run's own. look.py defines before_forward(acc, models),
before_step(acc, models), or both.

Exit codes: 0 stopped there, and all that could be compared is equal; 1 something differs, or the script failed; 2 the
update never came, or wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import checkpoint, hardware
from ...base import env
from ...base.lazy import modules_at_first_use
from ...errors import SettingError
from ...launcher.entrypoints import check_script
from ..harness import INTERRUPTED, Child, Script, count
from ..harness import reworded as reworded
from ..terminal import ended_by_signals

if TYPE_CHECKING:
    from ...parts import ring

modules_at_first_use(globals(), ring="..parts.ring")  # which imports torch

END = "end.txt"
SAME, DIFFERS, NOT_REACHED = CODES = ("same", "differs", "not reached")


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    parser.usage = "easymp replay RUN --step N [OPTIONS] [-- SCRIPT ARGUMENTS]"
    add("run", metavar="RUN", help="the project's folder, with its checkpoints")
    add("--step", type=count, required=True, metavar="N", help="the update, from 1, in front of which to stop")
    add("--hooks", type=Path, metavar="FILE", help="a Python file with before_forward, before_step, or both")
    add("--pdb", action="store_true", help="open a debugger where the script calls the step")
    add("--nonfinite", action="store_true", help="name the first module with a number that is not finite")
    add("--processes", type=int, metavar="N", help="where nothing says how many the run had")
    add("--cpu", action="store_true", help="on processes of the CPU, which have other last bits than a GPU's")
    add("-m", "--module", action="store_true", help="SCRIPT is a module's name")


def run(args: argparse.Namespace) -> int:
    project = Path(args.run).absolute()
    if not project.is_dir():
        raise SettingError(f"{args.run!r} is not a folder: pass the project's, with its checkpoints")
    if args.hooks is not None and not args.hooks.is_file():
        raise SettingError(f"--hooks {str(args.hooks)!r} is not a file")
    begin = ring.read(ring.path_of(str(project), 0))[0] or {}
    script, directory = script_of(args, begin)
    checkpoints = project / "checkpoints"
    start, writers = newest(checkpoints if checkpoints.is_dir() else project, args.step)
    processes = begin.get("ranks") or args.processes or writers or 1
    if args.processes not in (None, processes):
        raise SettingError(f"--processes {args.processes}: the run had {processes}, and replays on as many")
    device, detected = "cpu" if args.cpu else begin.get("device", "cpu"), hardware.detect()
    if device != "cpu" and (detected.kind != device or len(detected.devices) < processes):
        has = f"{len(detected.devices)} of {detected.kind}" if detected.devices else "none"
        raise SettingError(
            f"the run had {processes} processes, each on a device of {device}, and this machine has {has}: replay it "
            "on one with as many, or pass --cpu, which computes other last bits"
        )
    if args.pdb and processes > 1:
        raise SettingError(f"--pdb with {processes} processes, which share one terminal: use --hooks")
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="easymp-replay-") as scratch:
        script.write_task(
            Path(scratch),
            update=args.step,
            checkpoint=start,
            project=str(project),
            directory=directory,
            hooks=args.hooks and str(args.hooks.absolute()),
            pdb=args.pdb,
            nonfinite=args.nonfinite,
            begin=begin,
        )
        code = launch(scratch, processes, args.cpu, args.step, begin.get("variables"))
        end = Path(scratch, END)
        verdict = end.read_text(encoding="utf-8") if end.exists() else DIFFERS
    if code and verdict != NOT_REACHED:
        print(f"The replay failed (exit code {code}).")
        return 1
    return CODES.index(verdict)


def script_of(args: argparse.Namespace, begin: dict[str, Any]) -> tuple[Script, str]:
    """The script after ``--``, or else the run's own, and the folder to run it in."""
    if args.module and not args.arguments:
        raise SettingError("-m is for a module's name after --")
    if args.arguments:
        script, folder = Script(args.arguments[0], args.arguments[1:], args.module), os.getcwd()
    elif begin.get("script"):
        script, folder = Script(begin["script"], begin["arguments"], begin["module"]), begin.get("folder", "")
    else:
        logged = logged_script(Path(args.run))
        was = f"{args.run} was a run of {logged}, and" if logged else args.run
        raise SettingError(
            f"{was} has no record of its script's arguments and updates: a run keeps these under Settings(replay=64). "
            f"For this one, pass the script with its arguments, as in: -- {logged or 'train.py'} --lr 0.1"
        )
    folder = folder if os.path.isdir(folder) else os.getcwd()
    if not script.module:
        check_script(os.path.join(folder, script.path), module=False)
    return script, folder


def logged_script(project: Path) -> str | None:
    """The script that the description of a run's logged rows names, of several the last one's."""
    for path in sorted(project.glob("*.json"), key=os.path.getmtime, reverse=True):
        with suppress(ValueError, LookupError, TypeError):
            start = json.loads(path.read_text(encoding="utf-8"))["starts"][-1]
            return start["config"]["easymp"]["script"] or None
    return None


def newest(root: str | os.PathLike[str], step: int) -> tuple[str | None, int | None]:
    """The newest checkpoint before an update, on the line that `resume` follows, and the processes that wrote it."""
    entries = [e for e in checkpoint.list_checkpoints(root) if e.committed and not e.abandoned]
    earlier = [e for e in entries if e.step is not None and e.step < step]
    if not earlier:
        return None, entries[-1].world_size if entries else None
    last = max(earlier, key=lambda e: (e.step, e.written or ""))
    return f"{os.fspath(root)}/{last.name}", last.world_size


def launch(scratch: str, processes: int, cpu: bool, step: int, variables: dict[str, str] | None) -> int:
    """Run the ranks to their end, with the run's own variables where they are recorded; returns the exit code."""
    settings = {"project_dir": scratch, "log_with": "none", "save_on_signal": "false", "replay": str(step)}
    settings |= {"cpu": "true"} if cpu else {}
    rank = Script("easymp.cli.replay.rank", [scratch], module=True)
    cleared = dict.fromkeys(env.names(env.PREFIX)) if variables is not None else {}
    with env.override(**{**cleared, **(variables or {})}):
        child = Child(rank.launch(processes) if processes > 1 else rank.command(), settings)
    if child.wait() == INTERRUPTED:  # the ranks in this terminal get Ctrl-C, too
        raise KeyboardInterrupt
    return child.process.returncode
