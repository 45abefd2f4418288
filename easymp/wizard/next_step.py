"""The exact words to type next."""

from __future__ import annotations

import shlex
from pathlib import Path

from .. import env, project_file
from .case import Case

SCRIPT = "train.py"


def commands(case: Case, path: Path) -> list[str]:
    """What starts a script under the file at `path`: one line, or one a node.

    On several nodes a launcher that announces them (Slurm) starts the same line on each; without one the line names the node.
    """
    usual = Path(env.read(project_file.VARIABLE) or project_file.FILE)
    named = "" if _same(path, usual) else f"{project_file.VARIABLE}={shlex.quote(str(path))} "
    nodes = case.nodes[1]
    if nodes > 1 and case.machine.nodes > 1:
        return [f"{named}srun easymp launch {SCRIPT}"]
    if nodes > 1:
        address = "" if case.get("main_address") else " --main-address HOST"
        return [f"{named}easymp launch --node-rank {rank}{address} {SCRIPT}" for rank in range(nodes)]
    if case.world > 1:
        return [f"{named}easymp launch {SCRIPT}"]
    return [f"{named}python {SCRIPT}"]


def _same(path: Path, other: Path) -> bool:
    return path.resolve() == other.resolve()
