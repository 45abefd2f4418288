"""NUMA nodes: the cores that each rank of a launch gets, so that its memory is on its own node.

A rank with an NVIDIA GPU gets the cores of its GPU's node. Ranks on CPUs are spread evenly or not at all, because a rank with fewer cores
would delay the others. torch's own binding (torch.numa) needs numactl and a GPU for each rank.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from . import nvidia
from .cpu import number, text

ROOT = Path("/")
Cores = frozenset[int]


def plan(processes: int, threads: int, gpus: bool = True) -> tuple[list[Cores], int]:
    """Cores of each rank (empty: ranks use all of them), and the number of threads that each computes on.

    Args:
        threads: that this process may use.
        gpus: whether ranks compute on the accelerators here.
    """
    fair = max(1, threads // processes)
    if processes < 2 or not hasattr(os, "sched_setaffinity"):
        return [], fair
    chosen = choose(processes, nodes(), gpu_nodes() if gpus else [])
    return chosen, min(fair, *_shares(chosen)) if chosen else fair


def choose(processes: int, nodes: dict[int, Cores], gpus: Sequence[int | None]) -> list[Cores]:
    """The cores of each rank, or nothing.

    Args:
        nodes: usable cores by NUMA node; nodes without any are left out.
        gpus: the NUMA node of each accelerator, None where it is unknown; empty without accelerators.
    """
    if len(nodes) < 2:
        return []
    usable = sum(map(len, nodes.values()))
    if gpus:
        near = list(gpus[:processes])
        if len(near) < processes or not all(node in nodes for node in near):
            return []
        chosen = [nodes[node] for node in near if node is not None]
        return chosen if 2 * min(_shares(chosen)) >= usable // processes else []
    numbers, count = sorted(nodes), len(nodes)
    chosen = []
    for rank in range(processes):
        start = rank * count // processes
        end = max(start + 1, (rank + 1) * count // processes)
        chosen.append(frozenset().union(*(nodes[number] for number in numbers[start:end])))
    return chosen if min(_shares(chosen)) >= usable // processes else []


def _shares(chosen: list[Cores]) -> list[int]:
    """Number of cores for each rank, at least 1, if several ranks share one set."""
    return [max(1, len(each) // chosen.count(each)) for each in chosen]


def nodes(root: Path = ROOT, usable: Cores | None = None) -> dict[int, Cores]:
    """Usable cores by node, of nodes that have some; empty where the system does not say.

    Args:
        usable: None for this process's own mask, which cpusets of control groups are part of.
    """
    allowed = frozenset(os.sched_getaffinity(0)) if usable is None else usable
    found = {}
    for path in (root / "sys/devices/system/node").glob("node[0-9]*"):
        mine = parse(text(path / "cpulist")) & allowed
        if mine:
            found[int(path.name[4:])] = mine
    return found


def parse(listed: str) -> Cores:
    """Parse a list of numbers in the kernel's form: ``"0-3,8"``."""
    found: set[int] = set()
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def gpu_nodes(root: Path = ROOT) -> list[int | None]:
    """The node of each visible accelerator, in torch's order; None where it is unknown, as for all but NVIDIA's with NVML."""
    count = max(torch.cuda.device_count(), torch.xpu.device_count())
    seen = nvidia.read_nvml() if torch.cuda.device_count() and not torch.version.hip else None
    if seen is None or len(seen.cards) != count:
        return [None] * count
    return [near(card.address, root) for card in seen.cards]


def near(address: str | None, root: Path = ROOT) -> int | None:
    """The node of the device at a PCI address as NVML has it, ``"00000000:3B:00.0"``; None where the kernel says -1, or nothing."""
    if not address:
        return None
    domain, _, rest = address.lower().partition(":")
    return number(root / "sys/bus/pci/devices" / f"{int(domain, 16):04x}:{rest}" / "numa_node")
