"""The machine in a few words, for a report."""

from __future__ import annotations

import platform
from typing import Any

import torch

from ...hardware import Hardware
from ...version import __version__


def facts(hardware: Hardware) -> dict[str, Any]:
    """Plain values only; nothing in it names the machine or who uses it."""
    cpu = hardware.cpu
    return {
        "processor": cpu.name,
        "cores": cpu.cores,
        "threads": cpu.threads,
        "memory": cpu.memory,
        "devices": [
            {"name": d.name, "memory": d.memory, "architecture": d.architecture} for d in hardware.devices
        ],
        "links": hardware.links,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "easymp": __version__,
    }
