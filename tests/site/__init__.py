"""Recorded processors: all that tests run sees one of them, so that the suite says the same on every machine.

``TESTS_CPU=amx pytest`` names another one than `DEFAULT`. `sitecustomize.py` puts it into scripts that tests start.
"""

from __future__ import annotations

import os
from pathlib import Path

from .sitecustomize import CPUS, DEFAULT, VARIABLE, install

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])  # PYTHONPATH of scripts that tests start

__all__ = ["CPUS", "DEFAULT", "PATH", "ROOT", "VARIABLE", "install"]
