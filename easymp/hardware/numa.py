"""NUMA nodes: the cores of each that this process may use, and the node that each GPU hangs on."""

from __future__ import annotations

import os
from pathlib import Path

from ..base import env
from . import nvml
from .procfs import number, text

ROOT = Path("/")


def cores(root: Path = ROOT, usable: frozenset[int] | None = None) -> dict[int, frozenset[int]]:
    """Usable cores by node, of nodes that have some; empty where the system does not say. `usable`: None for this process's own mask,
    which cpusets of control groups are part of."""
    allowed = frozenset(os.sched_getaffinity(0)) if usable is None else usable
    found = {}
    for path in (root / "sys/devices/system/node").glob("node[0-9]*"):
        mine = parse(text(path / "cpulist")) & allowed
        if mine:
            found[int(path.name[4:])] = mine
    return found


def parse(listed: str) -> frozenset[int]:
    """Numbers of a list as the kernel writes it: ``"0-3,8"``."""
    found: set[int] = set()
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def gpus(root: Path = ROOT) -> list[int | None]:
    """The node of each visible accelerator, in torch's order; None where it is unknown, which it is for all but NVIDIA's with NVML."""
    import torch

    count = max(torch.cuda.device_count(), torch.xpu.device_count())
    if not count or torch.version.hip or not torch.cuda.device_count():
        return [None] * count
    seen = nvml.read(env.read("CUDA_VISIBLE_DEVICES"), env.read("CUDA_DEVICE_ORDER"))
    if seen is None or len(seen.cards) != count:
        return [None] * count
    return [near(address, root) for address in nvml.addresses([card.uuid for card in seen.cards])]


def near(address: str | None, root: Path = ROOT) -> int | None:
    """The node of the device at a PCI address as NVML has it, ``"00000000:3B:00.0"``; None where the kernel says -1, or nothing."""
    if not address:
        return None
    domain, _, rest = address.lower().partition(":")
    return number(root / "sys/bus/pci/devices" / f"{int(domain, 16):04x}:{rest}" / "numa_node")
