"""The processor, and the part of it that this process may use: instructions, affinity, control group limits, NUMA nodes."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

import psutil
import torch

from .facts import CPU

ROOT = Path("/")
ARCHITECTURES = {"amd64": "x86_64"}  # Windows' word

# Our names of the instructions, by those of torch.cpu.get_capabilities() and of /proc/cpuinfo.
_SAME = {
    name: name
    for name in (
        *("avx2", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "amx_int8"),
        *("i8mm", "sve", "sve2", "sme"),
    )
} | {"bf16": "neon_bf16"}
CAPABILITIES = _SAME | {
    "avx512_f": "avx512",
    "neon": "neon",
    "sve_bf16": "sve_bf16",
    "fp16_arith": "neon_fp16",
}
FLAGS = _SAME | {"avx512f": "avx512", "asimd": "neon", "svebf16": "sve_bf16", "asimdhp": "neon_fp16"}


def probe(root: Path = ROOT) -> CPU:
    """The facts of this machine; `root` is the folder with ``proc`` and ``sys``."""
    machine = platform.machine().lower()
    architecture = ARCHITECTURES.get(machine, machine)
    logical = psutil.cpu_count() or 1
    total = psutil.virtual_memory().total
    # macOS has no affinity.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    return CPU(
        name=name(root) or architecture,
        architecture=architecture,
        cores=psutil.cpu_count(logical=False) or logical,
        threads=threads(allowed, cpu_quota(root)),
        numa_nodes=numa_nodes(root),
        memory=min(total, memory_limit(root) or total),
        features=features(root),
    )


def name(root: Path = ROOT) -> str:
    """The processor's name as its maker writes it, or ``""``."""
    # 64-bit Arm has no "model name" on Linux; cpuinfo (in torch 2.13) makes a name of the part number.
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    model = _field(text(root / "proc/cpuinfo"), "model name")
    return (
        model
        or sysctl("machdep.cpu.brand_string")
        or str(known.get("cpu_name") or "")
        or platform.processor()
    )


def features(root: Path = ROOT) -> frozenset[str]:
    """The instructions that matter for training: by torch from 2.13 on, before by Linux; elsewhere unknown."""
    if hasattr(torch.cpu, "get_capabilities"):
        found = torch.cpu.get_capabilities()
        return frozenset(ours for theirs, ours in CAPABILITIES.items() if found.get(theirs) is True)
    cpuinfo = text(root / "proc/cpuinfo")  # x86 has a line "flags", Arm has "Features"
    flags = f"{_field(cpuinfo, 'flags')} {_field(cpuinfo, 'Features')}".split()
    return frozenset(FLAGS[flag] for flag in flags if flag in FLAGS)


def threads(allowed: int, quota: float | None) -> int:
    """Number of threads that can run at once, at least one.

    A quota of 1.5 processors means one thread: the second would be stopped half of the time, and every parallel loop waits
    for its last thread.
    """
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def numa_nodes(root: Path = ROOT) -> int:
    """Number of NUMA nodes that have processors."""
    lists = (root / "sys/devices/system/node").glob("node[0-9]*/cpulist")
    return max(1, sum(bool(text(path)) for path in lists))


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes that the control groups allow, or None without a limit."""
    limits = [number(group / "memory.max") for group in _groups(root)]
    limits += [
        number(root / "sys/fs/cgroup/memory/memory.limit_in_bytes")
    ]  # version 1, as a container sees it
    return min((limit for limit in limits if limit is not None), default=None)


def cpu_quota(root: Path = ROOT) -> float | None:
    """Processors that the control groups allow, such as 1.5; None without a quota."""
    first = root / "sys/fs/cgroup/cpu"
    pairs = [text(group / "cpu.max").split() for group in _groups(root)]
    pairs += [[text(first / "cpu.cfs_quota_us"), text(first / "cpu.cfs_period_us")]]
    quotas = [int(p[0]) / int(p[1]) for p in pairs if len(p) == 2 and all(n.isdigit() for n in p)]
    return min(quotas, default=None)


def _groups(root: Path) -> list[Path]:
    """The folders of this process's control group (version 2) and its ancestors: each limit holds for all below it.

    In a container the path may be the host's. Where it does not exist, the mount is the container's own group.
    """
    mount = root / "sys/fs/cgroup"
    lines = text(root / "proc/self/cgroup").splitlines()
    path = next((line[3:] for line in lines if line.startswith("0::")), "/").strip("/")
    group = mount / path if ".." not in path.split("/") and (mount / path).is_dir() else mount
    return [group, *(above for above in group.parents if above.is_relative_to(mount))]


def text(path: Path) -> str:
    """The file's text without surrounding blanks, or ``""`` where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def number(path: Path) -> int | None:
    """The file's number; None for anything else, such as "max" or -1, and for no file."""
    found = text(path)
    return int(found) if found.isdigit() else None


def _field(content: str, key: str) -> str:
    """The value of the first line ``key : value``, or ``""``."""
    found = re.search(rf"(?m)^{key}[ \t]*:(.*)$", content)
    return found[1].strip() if found else ""


def sysctl(key: str) -> str:
    """A value of sysctl on macOS; ``""`` elsewhere and for unknown keys."""
    if platform.system() != "Darwin":
        return ""
    try:
        return subprocess.run(["sysctl", "-n", key], capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
