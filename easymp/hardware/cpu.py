"""The processor, and the part of it that this process may use: instructions, affinity, control group limits, NUMA nodes.

Ranks of a launch get cores of one NUMA node each, so that their memory is on it: with an NVIDIA GPU of the GPU's node, else spread evenly
or not at all, because a rank with fewer cores would delay the others. torch's own binding (torch.numa) needs numactl and a GPU a rank.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import psutil
import torch

from .facts import CPU

Cores = frozenset[int]
ROOT = Path("/")
ARCHITECTURES = {"amd64": "x86_64"}  # Windows' word

# Our names of the instructions, by those of torch.cpu.get_capabilities() and of /proc/cpuinfo.
_SAME = "avx2 avx512_vnni avx512_bf16 avx512_fp16 amx_bf16 amx_fp16 amx_int8 i8mm sve sve2 sme neon sve_bf16"
NAMES = {name: name for name in _SAME.split()} | {"bf16": "neon_bf16", "avx512_f": "avx512"}
NAMES |= {"fp16_arith": "neon_fp16", "asimdhp": "neon_fp16", "avx512f": "avx512", "asimd": "neon"}
NAMES["svebf16"] = "sve_bf16"


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
    brand = model or sysctl("machdep.cpu.brand_string")
    return brand or str(known.get("cpu_name") or "") or platform.processor()


def features(root: Path = ROOT) -> frozenset[str]:
    """The instructions that matter for training: by torch from 2.13 on, before by Linux; elsewhere unknown."""
    if hasattr(torch.cpu, "get_capabilities"):
        found = torch.cpu.get_capabilities()
        return frozenset(ours for theirs, ours in NAMES.items() if found.get(theirs) is True)
    cpuinfo = text(root / "proc/cpuinfo")  # x86 has a line "flags", Arm has "Features"
    flags = f"{_field(cpuinfo, 'flags')} {_field(cpuinfo, 'Features')}".split()
    return frozenset(NAMES[flag] for flag in flags if flag in NAMES)


def threads(allowed: int, quota: float | None) -> int:
    """Number of threads that can run at once, at least one."""
    # Of 1.5 processors a second thread would be stopped half of the time, and every parallel loop waits for its last thread.
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def numa_nodes(root: Path = ROOT) -> int:
    """Number of NUMA nodes that have processors."""
    return max(1, sum(bool(text(path)) for path in _lists(root)))


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes that the control groups allow, or None without a limit."""
    limits = [number(group / "memory.max") for group in _groups(root)]
    # Version 1, as a container sees it.
    limits.append(number(root / "sys/fs/cgroup/memory/memory.limit_in_bytes"))
    return min((limit for limit in limits if limit is not None), default=None)


def cpu_quota(root: Path = ROOT) -> float | None:
    """Processors that the control groups allow, such as 1.5; None without a quota."""
    first = root / "sys/fs/cgroup/cpu"
    pairs = [text(group / "cpu.max").split() for group in _groups(root)]
    pairs += [[text(first / "cpu.cfs_quota_us"), text(first / "cpu.cfs_period_us")]]
    quotas = [int(p[0]) / int(p[1]) for p in pairs if len(p) == 2 and all(n.isdigit() for n in p)]
    return min(quotas, default=None)


def _groups(root: Path) -> list[Path]:
    """The folders of this process's control group (version 2) and its ancestors: each limit holds for all below it."""
    # In a container the path may be the host's. Where it does not exist, the mount is the container's own group.
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


# -- NUMA nodes -----------------------------------------------------------------------------------------------------------


def rank_cores(processes: int, threads: int, gpus: Sequence[int | None]) -> tuple[list[Cores], int]:
    """Cores of each rank (empty: ranks use all of them), and the number of threads that each computes on.

    Args:
        threads: that this process may use.
        gpus: the NUMA node of each accelerator, None where it is unknown; empty where ranks compute on CPUs.
    """
    fair = max(1, threads // processes)
    if processes < 2 or not hasattr(os, "sched_setaffinity"):
        return [], fair
    chosen = choose(processes, nodes(), gpus)
    return chosen, min(fair, *_shares(chosen)) if chosen else fair


def choose(processes: int, nodes: dict[int, Cores], gpus: Sequence[int | None]) -> list[Cores]:
    """The cores of each rank, or nothing; `nodes` has the usable cores by NUMA node."""
    if len(nodes) < 2:
        return []
    fair = sum(map(len, nodes.values())) // processes
    if gpus:
        near = gpus[:processes]
        if len(near) < processes or not all(node in nodes for node in near):
            return []
        chosen = [nodes[node] for node in near if node is not None]
        return chosen if 2 * min(_shares(chosen)) >= fair else []
    cores, count = [nodes[number] for number in sorted(nodes)], len(nodes)
    starts = [rank * count // processes for rank in range(processes + 1)]
    slices = [cores[start : max(start + 1, end)] for start, end in pairwise(starts)]
    chosen = [frozenset().union(*near) for near in slices]
    return chosen if min(_shares(chosen)) >= fair else []


def _shares(chosen: list[Cores]) -> list[int]:
    """Number of cores for each rank, at least 1, if several ranks share one set."""
    return [max(1, len(each) // chosen.count(each)) for each in chosen]


def nodes(root: Path = ROOT, usable: Cores | None = None) -> dict[int, Cores]:
    """Cores of `usable` (None: this process's mask, cpusets included) by node, of nodes that have some."""
    allowed = frozenset(os.sched_getaffinity(0)) if usable is None else usable
    found = {int(path.parent.name[4:]): parse(text(path)) & allowed for path in _lists(root)}
    return {node: cores for node, cores in found.items() if cores}


def _lists(root: Path) -> Iterable[Path]:
    return (root / "sys/devices/system/node").glob("node[0-9]*/cpulist")


def parse(listed: str) -> Cores:
    """Parse a list of numbers in the kernel's form: ``"0-3,8"``."""
    found: set[int] = set()
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
