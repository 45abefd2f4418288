"""The harness in the script's own process: it runs the script, with a part that watches it for a command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...base.parts import RUNNER_PARTS, Part
from ...launcher.worker import run_module, run_script
from . import TASK


class Stop(SystemExit):
    """Ends the script in front of or after the last update that a command looks at."""


def read_task(folder: Path) -> dict[str, Any]:
    task: dict[str, Any] = json.loads((folder / TASK).read_text(encoding="utf-8"))
    return task


class Runner(Part):
    """Runs the script of a task, and is a part of the Accelerator that the script makes."""

    name = "runner"

    def __init__(self, folder: Path, task: dict[str, Any]) -> None:
        self.folder, self.task = folder, task

    def join_run(self) -> Part:
        """Return the part that joins a new Accelerator of the script; called once for each Accelerator."""
        return self

    def play(self) -> None:
        run = run_module if self.task["module"] else run_script
        RUNNER_PARTS.append(self.join_run)
        try:
            run(self.task["script"], list(self.task["arguments"]))
        finally:
            RUNNER_PARTS.remove(self.join_run)
