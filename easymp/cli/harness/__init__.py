"""The harness of `easymp compare`, `prove`, `rehearse` and `replay`: it runs a user's script as given.

Arguments of the four commands, processes with settings that win over the script's own, timeouts and signals. `rank` is
the part in the script's own process.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from ...base import env
from ...base.units import duration
from ...errors import SettingError, check_whole
from ...settings import NAMES, OVERRIDE, RECORD, checked, overrides
from ..terminal import BOLD, GREEN, RED, YELLOW, paint, plain, wrap

GRACE = 40.0  # seconds to end in after SIGTERM: more than the launcher gives its ranks
TAIL = 1 << 16  # bytes of output in which the reason of a failure is looked for
FIRST_FAILURE = re.compile(r"^rank \d+ of \d+ failed first: (.*)$", re.MULTILINE)
FINISHED, FAILURE, LATE, INTERRUPTED = "finished", "failed", "timed out", "interrupted"
PROVEN, DIFFERS, FAILED, NOT_COMPARED = "proven", "differs", "failed", "not compared"  # verdicts of `easymp prove`
TASK, REFUSED = "task.json", "refused.txt"
COLOURS = (GREEN, RED, YELLOW)  # by exit code


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the words that `prove` and `rehearse` share."""
    add = parser.add_argument
    parser.usage = f"{parser.prog} SCRIPT [OPTIONS] [-- ARGUMENTS]"
    add("script", metavar="SCRIPT", help="its path; its own arguments follow --")
    add("--strategy", metavar="NAME", help="single, ddp, zero1, fsdp, hsdp … (the script's own)")
    add("--precision", metavar="NAME", help="fp32, bf16 … (the script's own)")
    sets = "a setting of the plan, over the script's own; may be repeated"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=sets)
    add("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    add("--json", action="store_true", help="print all of it as JSON")


def reworded(arguments: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """Keep the words after ``--`` for the script."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser.set_defaults(arguments=arguments[cut + 1 :])
    return arguments[:cut]


def count(text: str) -> int:
    return check_whole(repr(text), int(text) if text.isdecimal() else text, 1, argparse.ArgumentTypeError)


def plan_settings(args: argparse.Namespace) -> dict[str, str]:
    """The settings that --precision and --strategy ask for; SettingError where one of them or of --set is wrong."""
    overrides(args.set)
    flags = {"mixed_precision": args.precision, "strategy": args.strategy}
    return {name: str(checked(NAMES[name], text, f"{name}=")) for name, text in flags.items() if text is not None}


def check_new(folder: Path) -> None:
    """Raises SettingError where a folder for the output has files already."""
    if folder.exists() and any(folder.iterdir()):
        raise SettingError(f"{str(folder)!r} is there, and not empty: name a new folder with --output")


def headline(sentence: str, code: int) -> str:
    return paint(wrap(plain(sentence)), f"{BOLD};{COLOURS[code]}")


class Script(NamedTuple):
    """A script: its path (with `module` its name), and its own arguments."""

    path: str
    arguments: Sequence[str] = ()
    module: bool = False

    def command(self, *launcher: str) -> list[str]:
        """The command that runs it in one process, or by the module `launcher`."""
        words = [self.path, *self.arguments]
        if self.module:
            words.insert(0, "-m")
        return [sys.executable, *launcher, *words]

    def launch(self, processes: int | None) -> list[str]:
        """The command that runs it on so many processes; None: one an accelerator, or one without any."""
        number = [] if processes is None else ["--processes", str(processes)]
        return self.command("-m", "easymp", "launch", *number)

    def write_task(self, folder: Path, **facts: Any) -> None:
        """Write what `rank.read_task` reads: the script and `facts`."""
        task = {"script": self.path, "arguments": list(self.arguments), "module": self.module, **facts}
        (folder / TASK).write_text(json.dumps(task), encoding="utf-8")


class Child:
    """A running command.

    Args:
        settings: they win over the script's own.
        variables: for its environment.
        output: the file for all that it prints. The command has a session of its own then, so that Ctrl-C comes to this
            process only. None: it shares this terminal.
    """

    def __init__(
        self,
        command: Sequence[str],
        settings: Mapping[str, str],
        variables: Mapping[str, str] | None = None,
        output: Path | None = None,
    ) -> None:
        pairs = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
        override = " ".join(filter(None, [env.read(OVERRIDE), *pairs]))
        environment = env.merged({**(variables or {}), OVERRIDE: override})
        self.output = output
        with ExitStack() as stack:
            options: dict[str, Any] = {}
            if output is not None:
                file = stack.enter_context(open(output, "wb"))
                options = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, "start_new_session": True}
            self.process = subprocess.Popen(command, env=environment, **options)

    def wait(self, timeout: float | None = None) -> str:
        """Wait for its end and return how it ended; `timeout` seconds and KeyboardInterrupt stop it."""
        try:
            return FINISHED if self.process.wait(timeout) == 0 else FAILURE
        except subprocess.TimeoutExpired:
            status = LATE
        except KeyboardInterrupt:
            status = INTERRUPTED
        self.stop()
        return status

    def stop(self) -> None:
        """Send SIGTERM, which the launcher passes on; after GRACE or a second Ctrl-C, SIGKILL to all that are left."""
        family = self._children()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(GRACE)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            pass
        finally:
            self.kill(family)

    def kill(self, family: Sequence[psutil.Process] = ()) -> None:
        """End it, all of its children and `family` at once by SIGKILL, and wait until they are gone."""
        processes = {*family, *self._children()}
        self.process.kill()
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        self.process.wait()
        psutil.wait_procs(processes, timeout=GRACE)

    def _children(self) -> list[psutil.Process]:
        if self.process.returncode is not None:  # its number may be another process's by now
            return []
        try:
            children: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
            return children
        except psutil.Error:
            return []

    def reason(self) -> str:
        """Why it failed: the launcher's sentence, the last line of the output, or the exit code."""
        text = ""
        if self.output is not None:
            with open(self.output, "rb") as file:
                file.seek(max(0, file.seek(0, 2) - TAIL))
                text = file.read().decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        first_failures: list[str] = FIRST_FAILURE.findall(text)
        return [f"exit code {self.process.returncode}", *lines[-1:], *first_failures[-1:]][-1]


@dataclass(frozen=True)
class End:
    """The end of a run. Field names are those of the JSON of `easymp compare`."""

    status: str  # "finished", "failed", "timed out" or "interrupted"
    why: str  # a sentence where it did not finish; else ""
    started: float  # seconds since the epoch
    wall: float  # seconds in all


def run(
    head: str, command: Sequence[str], folder: Path, settings: Mapping[str, str], timeout: float | None = None
) -> End:
    """Run a command to its end. `folder`, which is made, gets its record, its project and ``output.txt``.

    An interruption (KeyboardInterrupt) stops the run and is an end like others. `head` begins the lines on stderr
    about the begin and the end.
    """
    print(f"{head}: starting", file=sys.stderr, flush=True)
    folder.mkdir(parents=True)
    started, start = time.time(), time.perf_counter()
    settings = {**settings, "project_dir": str(folder / "project")}
    child = Child(command, settings, {RECORD: str(folder)}, folder / "output.txt")
    status = child.wait(timeout)
    wall = time.perf_counter() - start
    print(f"{head}: {status} after {duration(wall)}", file=sys.stderr, flush=True)
    reasons = {
        FINISHED: "",
        FAILURE: child.reason(),
        LATE: f"stopped after {timeout or 0:g} seconds (--timeout)",
        INTERRUPTED: "stopped by a signal",
    }
    return End(status, reasons[status], started, wall)
