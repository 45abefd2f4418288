"""The exact words to type next."""

from __future__ import annotations

import shlex
from pathlib import Path

from ... import settings
from ...base import env
from .case import Case

SCRIPT = "train.py"


def command(case: Case, path: Path) -> tuple[str, str]:
    """What starts a script under the file at `path`, and where to type it; "" for here alone."""
    usual = Path(env.read(settings.VARIABLE) or settings.FILE)
    named = "" if path.resolve() == usual.resolve() else f"{settings.VARIABLE}={shlex.quote(str(path))} "
    least, most = case.nodes
    if (
        case.machine.nodes > 1 and most > 1
    ):  # one launcher a node, which finds the others by the job's variables
        return f"{named}srun easymp launch {SCRIPT}", ""
    if most > 1:
        address = "" if case.get("main_address") else f" --main-address {case.machine.name}"
        many = str(most) if least == most else f"{least} to {most}"
        return (
            f"{named}easymp launch{address} {SCRIPT}",
            f"On each of the {many} machines, of which this one is the first:",
        )
    if case.assumed and not case.get("processes"):
        return (
            f"{named}easymp launch --processes {case.assumed} {SCRIPT}",
            "Where several accelerators are, without --processes; here:",
        )
    return f"{named}{'easymp launch' if case.world > 1 else 'python'} {SCRIPT}", ""
