"""One run of the script under one plan, in processes of its own, as `easymp launch` starts them."""

from __future__ import annotations

import itertools
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ...base import env
from ...errors import SettingError
from ...settings import NAMES, OVERRIDE, RECORD, checked

GRACE = 40.0  # seconds to end in after SIGTERM: more than the launcher gives its ranks
FAILED = re.compile(r"^rank \d+ of \d+ failed first: (.*)$", re.MULTILINE)
TAIL = 1 << 16  # bytes of output in which the reason of a failure is looked for
FINISHED, FAILURE, LATE, INTERRUPTED = "finished", "failed", "timed out", "interrupted"


@dataclass(frozen=True)
class Variant:
    """One plan to run the script under.

    Attributes:
        name: what distinguishes it from the others.
        settings: by setting's name, as text; they win over the script's own.
        processes: None: one an accelerator, or one without any.
    """

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    processes: int | None = None

    def override(self, **more: str) -> str:
        """The settings, and `more`, as EASYMP_OVERRIDE takes them."""
        return " ".join(f"{name}={shlex.quote(value)}" for name, value in {**self.settings, **more}.items())


def variants(
    precisions: Sequence[str] = (), strategies: Sequence[str] = (), processes: Sequence[int] = ()
) -> list[Variant]:
    """Every combination, in order. A list that is empty is left to the script.

    Raises:
        SettingError: a wrong name, or one given twice.
    """
    for word, given in (("mixed_precision", precisions), ("strategy", strategies), ("processes", processes)):
        for value in given if word in NAMES else ():
            checked(NAMES[word], value, f"{word}=")
        if len(set(given)) < len(given):
            raise SettingError(
                f"{', '.join(map(str, given))}: one of them is there twice; use --repeats to run each several times"
            )
    found = []
    for precision, strategy, count in itertools.product(
        precisions or [""], strategies or [""], processes or [0]
    ):
        parts = [
            precision if len(precisions) > 1 or not (strategies[1:] or processes[1:]) else "",
            strategy if len(strategies) > 1 else "",
            f"{count} process{'es' * (count > 1)}" if len(processes) > 1 else "",
        ]
        settings = {"mixed_precision": precision, "strategy": strategy}
        name = " ".join(filter(None, parts)) or strategy or "as it is"
        found.append(Variant(name, {word: value for word, value in settings.items() if value}, count or None))
    return found


@dataclass(frozen=True)
class Task:
    """The script.

    Attributes:
        script: its path, or with `module` the name after ``python -m``.
        arguments: its own.
        timeout: seconds for a run, or None.
    """

    script: str
    arguments: Sequence[str] = ()
    module: bool = False
    timeout: float | None = None

    def command(self, variant: Variant) -> list[str]:
        """The words that start a run."""
        processes = [] if variant.processes is None else ["--processes", str(variant.processes)]
        launch = [sys.executable, "-m", "easymp", "launch", *processes]
        return [*launch, *["-m"] * self.module, self.script, *self.arguments]


@dataclass(frozen=True)
class End:
    """How a run ended.

    Attributes:
        status: one of the words above.
        why: a sentence where it did not finish; else "".
        started: seconds since the epoch.
        wall: seconds in all.
        others: processors that other work on the machine used meanwhile, on average; None where unknown.
    """

    status: str
    why: str
    started: float
    wall: float
    others: float | None


def run(task: Task, variant: Variant, folder: Path, seed: int | None = None) -> End:
    """Run the script to its end, and put its record and ``output.txt`` into `folder`, which is made.

    An interruption (KeyboardInterrupt) stops the run and is an end like others.
    """
    own = {"project_dir": str(folder / "project")} | ({} if seed is None else {"seed": str(seed)})
    override = " ".join(filter(None, [env.read(OVERRIDE), variant.override(**own)]))
    folder.mkdir(parents=True)
    before, started, begun = _others(), time.time(), time.perf_counter()
    with open(folder / "output.txt", "wb") as output:
        process = subprocess.Popen(
            task.command(variant),
            env=env.merged({OVERRIDE: override, RECORD: str(folder)}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C comes to this process only, and a stopped run gets one signal
        )
        try:
            status = FINISHED if process.wait(task.timeout) == 0 else FAILURE
        except subprocess.TimeoutExpired:
            status = LATE
        except KeyboardInterrupt:
            status = INTERRUPTED
        if status in (LATE, INTERRUPTED):
            _stop(process)
    wall = time.perf_counter() - begun
    after = _others()
    others = None if before is None or after is None else max(0.0, after - before) / wall
    return End(status, _why(status, process.returncode, task, folder), started, wall, others)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, which the launcher passes on; after GRACE, or a second Ctrl-C, SIGKILL to all that are left."""
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
            except psutil.Error:  # it has ended
                continue
        process.wait()


def _why(status: str, code: int, task: Task, folder: Path) -> str:
    if status != FAILURE:
        late = f"stopped after {task.timeout:g} seconds (--timeout)" if task.timeout else ""
        return {FINISHED: "", LATE: late, INTERRUPTED: "stopped by a signal"}[status]
    with open(folder / "output.txt", "rb") as output:
        output.seek(max(0, output.seek(0, 2) - TAIL))
        text = output.read().decode(errors="replace")
    told = FAILED.findall(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return told[-1] if told else lines[-1] if lines else f"exit code {code}"


def _others() -> float | None:
    """Seconds of processors that others than this process and its ended children have used so far, on the whole machine."""
    try:
        spent = psutil.cpu_times()
    except (OSError, NotImplementedError):
        return None
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    busy = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(getattr(spent, name, 0.0) for name in busy) - sum(use.ru_utime + use.ru_stime for use in own)
