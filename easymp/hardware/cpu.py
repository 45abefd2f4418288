"""The processor, and how much of it this process may use."""

from __future__ import annotations

import platform
from pathlib import Path

import psutil
import torch

from . import cgroup, instructions
from .facts import CPU
from .procfs import apple, line, text

ROOT = Path("/")
ARCHITECTURES = {"amd64": "x86_64"}  # Windows' word


def probe(root: Path = ROOT) -> CPU:
    """The facts of this machine; `root` is where ``proc`` and ``sys`` lie."""
    machine = platform.machine().lower()
    architecture = ARCHITECTURES.get(machine, machine)
    logical = psutil.cpu_count() or 1
    total = psutil.virtual_memory().total
    return CPU(
        name=name(root) or architecture,
        architecture=architecture,
        cores=psutil.cpu_count(logical=False) or logical,
        threads=threads(_affinity() or logical, cgroup.cpu_quota(root)),
        numa_nodes=numa_nodes(root),
        memory=min(total, cgroup.memory_limit(root) or total),
        features=instructions.features(root),
    )


def threads(allowed: int, quota: float | None) -> int:
    """How many threads can really run at once, at least one.

    A quota of 1.5 processors means one thread: the second would be stopped half of the time, and every parallel loop waits
    for its last thread.
    """
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def numa_nodes(root: Path = ROOT) -> int:
    """Nodes that have processors; nodes of memory alone (CXL, HBM) compute nothing."""
    lists = (root / "sys/devices/system/node").glob("node[0-9]*/cpulist")
    return max(1, sum(bool(text(path)) for path in lists))


def name(root: Path = ROOT) -> str:
    """The processor's name as its maker writes it, or ``""``."""
    # 64-bit Arm has no "model name" on Linux; what cpuinfo (in torch 2.13) makes of the part number is the next best.
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return (
        line(text(root / "proc/cpuinfo"), "model name")
        or apple("machdep.cpu.brand_string")
        or str(known.get("cpu_name") or "")
        or platform.processor()
    )


def _affinity() -> int | None:
    """How many processors the scheduler may put this process on; None where there is no such thing (macOS)."""
    try:
        return len(psutil.Process().cpu_affinity())
    except (AttributeError, psutil.Error, OSError):
        return None
