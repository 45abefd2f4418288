"""One run of the script, in processes of its own, as `easymp launch` starts them: how it ended, and what else the machine did."""

from __future__ import annotations

import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ..base import env
from ..settings import OVERRIDE, RECORD
from .variants import Variant

GRACE = 40.0  # seconds to end in after SIGTERM: more than the launcher gives its ranks
FAILED = re.compile(r"^rank \d+ of \d+ failed first: (.*)$", re.MULTILINE)
TAIL = 1 << 16  # bytes of output in which the reason is looked for

FINISHED, FAILURE, LATE, INTERRUPTED = "finished", "failed", "timed out", "interrupted"


@dataclass(frozen=True)
class Task:
    """What is run each time.

    Attributes:
        script: its path, or with `module` the name after ``python -m``.
        arguments: its own.
        timeout: seconds for a run, or None.
    """

    script: str
    arguments: Sequence[str] = ()
    module: bool = False
    timeout: float | None = None


@dataclass(frozen=True)
class End:
    """How a run ended.

    Attributes:
        status: one of the words above.
        why: a sentence where it did not finish; else "".
        started: seconds since the epoch.
        wall: seconds in all.
        others: processors that other work used meanwhile, on average; None where nobody knows.
    """

    status: str
    why: str
    started: float
    wall: float
    others: float | None


def run(task: Task, variant: Variant, folder: Path, seed: int | None = None) -> End:
    """Run it to its end, and put its record and ``output.txt`` into `folder`.

    An interruption (KeyboardInterrupt) stops the run and is an end like others.
    """
    own = {"project_dir": str(folder / "project")}
    if seed is not None:
        own["seed"] = str(seed)
    given = env.read(OVERRIDE)
    override = variant.override(**own)
    variables = {OVERRIDE: f"{given} {override}" if given else override, RECORD: str(folder)}
    folder.mkdir(parents=True)
    before, started, begun = _processors(), time.time(), time.perf_counter()
    with open(folder / "output.txt", "wb") as output:
        # A session of its own: Ctrl-C comes here alone, and what is stopped gets one signal.
        process = subprocess.Popen(
            command(task, variant),
            env=env.merged(variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status = _wait(process, task.timeout)
    wall = time.perf_counter() - begun
    after = _processors()
    others = None if before is None or after is None else max(0.0, after - before) / wall
    return End(status, _why(status, process.returncode, task, folder), started, wall, others)


def command(task: Task, variant: Variant) -> list[str]:
    """The words of a run."""
    words = [sys.executable, "-m", "easymp", "launch"]
    if variant.processes is not None:
        words += ["--processes", str(variant.processes)]
    return [*words, *["-m"] * task.module, task.script, *task.arguments]


def _wait(process: subprocess.Popen[bytes], timeout: float | None) -> str:
    try:
        return FINISHED if process.wait(timeout) == 0 else FAILURE
    except subprocess.TimeoutExpired:
        _stop(process)
        return LATE
    except KeyboardInterrupt:
        _stop(process)
        return INTERRUPTED


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, which the launcher hands on; and for those that do not go, or at a second Ctrl-C, SIGKILL."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        family = []
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
    finally:
        for member in family:
            try:
                member.kill()
            except psutil.Error:  # it has gone
                continue
        process.wait()


def _why(status: str, code: int, task: Task, folder: Path) -> str:
    if status == FINISHED:
        return ""
    if status == LATE:
        return f"stopped after {task.timeout:g} seconds (--timeout)"
    if status == INTERRUPTED:
        return "stopped by a signal"
    with open(folder / "output.txt", "rb") as output:
        output.seek(max(0, output.seek(0, 2) - TAIL))
        text = output.read().decode(errors="replace")
    told = FAILED.findall(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return told[-1] if told else lines[-1] if lines else f"exit code {code}"


def _processors() -> float | None:
    """Seconds of processors that others than this process and its ended children have used so far, on the whole machine."""
    try:
        spent = psutil.cpu_times()
    except (OSError, NotImplementedError):
        return None
    others = sum(getattr(spent, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        mine = resource.getrusage(who)
        others -= mine.ru_utime + mine.ru_stime
    return others
