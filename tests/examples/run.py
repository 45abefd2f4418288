"""Scripts run as a user runs them: in a fresh interpreter."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

from ..site import PATH

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """The variables of a user's shell: none of a launcher or of easymp, and one thread a process."""
    foreign = ("EASYMP_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMP_")
    left = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return left | {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}


def run(script: str | Path, *arguments: str, directory: Path = ROOT) -> str:
    """What the script prints; a failure fails the test with the script's last words."""
    command = [sys.executable, str(ROOT / script), *arguments]
    done = subprocess.run(command, cwd=directory, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def number(name: str, printed: str) -> float:
    """The number after `name` at the beginning of a line; per cents as they stand."""
    found = re.search(rf"^{name} +([0-9.]+)", printed, re.MULTILINE)
    assert found, printed
    return float(found[1])


def within(script: str, *arguments: str) -> str:
    """What the script prints on this rank, run within this process.

    For the fixture `ranks`, which saves the imports.
    """
    before, sys.argv = sys.argv, [script, *arguments]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(ROOT / script), run_name="__main__")
    finally:
        sys.argv = before
    return printed.getvalue()
