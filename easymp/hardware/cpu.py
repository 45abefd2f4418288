"""The processor, as this process may use it: instructions, affinity, limits of control groups, NUMA nodes."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path("/")

# Our names of the instructions, by those of torch.cpu.get_capabilities() and of /proc/cpuinfo.
_SAME = "avx2 avx512_vnni avx512_bf16 avx512_fp16 amx_bf16 amx_fp16 amx_int8 i8mm sve sve2 sme neon sve_bf16"
NAMES = {name: name for name in _SAME.split()} | {"bf16": "neon_bf16", "avx512_f": "avx512"}
NAMES |= {"fp16_arith": "neon_fp16", "asimdhp": "neon_fp16", "avx512f": "avx512", "asimd": "neon"}
NAMES["svebf16"] = "sve_bf16"


@dataclass(frozen=True)
class CPU:
    """The processor, as this process may use it."""

    name: str
    architecture: str  # "x86_64", "aarch64", "arm64"
    cores: int  # physical cores of the machine
    threads: int  # logical processors this process may run on: affinity and cgroup quota counted in
    numa_nodes: int
    memory: int  # the smaller of the machine's and the cgroup's limit
    features: frozenset[str] = frozenset()  # "avx2", "avx512_bf16", "avx512_fp16", "amx_bf16", "sve_bf16" …

    @property
    def bf16(self) -> bool:
        """Whether there are instructions for bf16 products, not only conversions."""
        return bool(self.features & {"avx512_bf16", "amx_bf16", "sve_bf16", "neon_bf16"})

    @property
    def fp16(self) -> bool:
        """Whether there are instructions for fp16 arithmetic that make it worth running."""
        return bool(self.features & {"avx512_fp16", "amx_fp16"})


def probe(root: Path = ROOT) -> CPU:
    """The facts of this machine; `root` is the folder with ``proc`` and ``sys``."""
    machine = platform.machine().lower()
    architecture = "x86_64" if machine == "amd64" else machine  # Windows' word
    logical = os.cpu_count() or 1
    total = _total_memory(root)
    node_lists = root.glob("sys/devices/system/node/node[0-9]*/cpulist")
    # macOS has no affinity.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    quota = cpu_quota(root)
    # Of 1.5 processors a second thread would be stopped half of the time, and parallel loops wait for their last one.
    threads = allowed if quota is None else max(1, min(allowed, int(quota)))
    return CPU(
        name=name(root) or architecture,
        architecture=architecture,
        cores=_physical_cores(root) or logical,
        threads=threads,
        numa_nodes=max(1, sum(bool(text(path)) for path in node_lists)),  # with processors
        memory=min(total, memory_limit(root) or total),
        features=features(root),
    )


def _total_memory(root: Path) -> int:
    """Bytes of memory, as Linux writes them; elsewhere by psutil, which is slow to import."""
    kibibytes = _field(text(root / "proc/meminfo"), "MemTotal").removesuffix("kB").strip()
    if kibibytes.isdigit():
        return int(kibibytes) * 1024
    import psutil

    return int(psutil.virtual_memory().total)


def _physical_cores(root: Path) -> int | None:
    """Cores of all sockets, as Linux writes them of x86; elsewhere by psutil. None: unknown."""
    cpuinfo = text(root / "proc/cpuinfo")
    places = (re.findall(rf"(?m)^{key}[ \t]*:[ \t]*(\d+)$", cpuinfo) for key in ("physical id", "core id"))
    if unique := set(zip(*places)):
        return len(unique)
    import psutil

    counted: int | None = psutil.cpu_count(logical=False)
    return counted


def name(root: Path = ROOT) -> str:
    """The processor's name as its maker writes it, or ``""``."""
    # 64-bit Arm has no "model name" on Linux; cpuinfo (in torch 2.13) makes a name of the part number.
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    model = _field(text(root / "proc/cpuinfo"), "model name")
    brand = model or sysctl("machdep.cpu.brand_string")
    return brand or str(capabilities.get("cpu_name") or "") or platform.processor()


def features(root: Path = ROOT) -> frozenset[str]:
    """The instructions that matter for training: by torch from 2.13 on, before by Linux; elsewhere unknown."""
    if hasattr(torch.cpu, "get_capabilities"):
        capabilities = torch.cpu.get_capabilities()
        return frozenset(feature for key, feature in NAMES.items() if capabilities.get(key) is True)
    cpuinfo = text(root / "proc/cpuinfo")  # x86 has a line "flags", Arm has "Features"
    flags = f"{_field(cpuinfo, 'flags')} {_field(cpuinfo, 'Features')}".split()
    return frozenset(NAMES[flag] for flag in flags if flag in NAMES)


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes that the control groups allow, or None without a limit."""
    # Version 1, as a container sees it, and version 2.
    limits = [number(root / "sys/fs/cgroup/memory/memory.limit_in_bytes")]
    limits += [number(group / "memory.max") for group in _groups(root)]
    return min((limit for limit in limits if limit is not None), default=None)


def cpu_quota(root: Path = ROOT) -> float | None:
    """Processors that the control groups allow, such as 1.5; None without a quota."""
    version_1 = root / "sys/fs/cgroup/cpu"
    limits = [[text(version_1 / "cpu.cfs_quota_us"), text(version_1 / "cpu.cfs_period_us")]]
    limits += [text(group / "cpu.max").split() for group in _groups(root)]  # version 2
    quotas = [int(pair[0]) / int(pair[1]) for pair in limits if len(pair) == 2 and all(n.isdigit() for n in pair)]
    return min(quotas, default=None)


def _groups(root: Path) -> list[Path]:
    """The folders of this process's control group (version 2) and its ancestors: each limit holds for all below it."""
    # In a container the path may be the host's. Where it does not exist, the mount is the container's own group.
    mount = root / "sys/fs/cgroup"
    lines = text(root / "proc/self/cgroup").splitlines()
    path = next((line[3:] for line in lines if line.startswith("0::")), "/").strip("/")
    group = mount / path if ".." not in path.split("/") and (mount / path).is_dir() else mount
    return [group, *(parent for parent in group.parents if parent.is_relative_to(mount))]


def text(path: Path) -> str:
    """The file's text without surrounding blanks, or ``""`` where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def number(path: Path) -> int | None:
    """The file's number; None for anything else, such as "max" or -1, and for no file."""
    content = text(path)
    return int(content) if content.isdigit() else None


def _field(content: str, key: str) -> str:
    """The value of the first line ``key : value``, or ``""``."""
    match = re.search(rf"(?m)^{key}[ \t]*:(.*)$", content)
    return match[1].strip() if match else ""


def sysctl(key: str) -> str:
    """A value of sysctl on macOS; ``""`` elsewhere and for unknown keys."""
    if platform.system() != "Darwin":
        return ""
    try:
        return subprocess.run(["sysctl", "-n", key], capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
