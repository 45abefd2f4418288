"""What the kernel lets this process use: control group limits, version 1 and 2, and both at once.

A limit holds for everything below it, so every group from the process's own up to the mount counts, and the tightest wins.
In a container the path in ``/proc/self/cgroup`` may be the host's: it is looked up below the mount's own root, and where
that does not fit, the mount itself is the container's group.

Files and units: kernel documentation, admin-guide/cgroup-v2 (``memory.max``, ``cpu.max``) and admin-guide/cgroup-v1
(``memory.limit_in_bytes``, ``cpu.cfs_quota_us``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from .procfs import number, text

ROOT = Path("/")


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes, or None without a limit. Version 1 writes a number near 2**63 for none: the caller takes the minimum anyway."""
    limits = [number(group / "memory.max") for group in _groups(root, None)]
    for group in _groups(root, "memory"):
        limits.append(number(group / "memory.limit_in_bytes"))
        # A namespace hides the ancestors' files, but not this sum over them.
        limits.append(_field(group / "memory.stat", "hierarchical_memory_limit"))
    return min((limit for limit in limits if limit is not None), default=None)


def cpu_quota(root: Path = ROOT) -> float | None:
    """Processors' worth of time, as 1.5, or None without a quota."""
    quotas = []
    for group in _groups(root, None):
        quota, _, period = text(group / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    for group in _groups(root, "cpu"):
        quota, period = number(group / "cpu.cfs_quota_us"), number(group / "cpu.cfs_period_us")
        if quota and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _groups(root: Path, controller: str | None) -> Iterator[Path]:
    """Directories of this process's group and its ancestors: of a version 1 `controller`, or with None of version 2."""
    paths = _paths(root, controller)
    for inside, mount in _mounts(root, controller):
        base = root / mount.lstrip("/")
        for path in paths:
            below = PurePosixPath(path)
            below = (
                below.relative_to(inside)
                if below.is_relative_to(inside) and ".." not in below.parts
                else PurePosixPath()
            )
            group = base / below
            while True:
                yield group
                if group == base:
                    break
                group = group.parent


def _paths(root: Path, controller: str | None) -> list[str]:
    """Lines of /proc/self/cgroup are ``number:controllers:path``; version 2's is ``0::path``."""
    lines = [line.split(":", 2) for line in text(root / "proc/self/cgroup").splitlines()]
    return [
        path for _, names, path in lines if (controller in names.split(",") if controller else names == "")
    ]


def _mounts(root: Path, controller: str | None) -> list[tuple[str, str]]:
    """(root within the hierarchy, mount point) of each mount: /proc/self/mountinfo, fields 4 and 5 (man 5 proc)."""
    found = []
    for line in text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = (after.split(" ", 2) + ["", ""])[:3]
        if (kind == "cgroup" and controller in options.split(",")) if controller else kind == "cgroup2":
            found.append((before.split()[3], before.split()[4]))
    return found


def _field(path: Path, name: str) -> int | None:
    """A number of a file of lines ``name number``."""
    for each in text(path).splitlines():
        key, _, value = each.partition(" ")
        if key == name and value.isdigit():
            return int(value)
    return None
