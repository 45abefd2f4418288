"""Cores for each rank: on a machine with several NUMA nodes, those of one node, so that a rank's memory lies where it computes.

A rank with an NVIDIA GPU gets the node that its GPU hangs on, as NVML and sysfs tell. Ranks on CPUs are spread evenly, or not at all: a
rank with fewer cores than the others would hold them all up. Only cores that this process may use itself are given away, and where the
GPUs' nodes are not known nothing is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence


def plan(processes: int, numa: bool = True) -> tuple[str, int]:
    """What `bind` takes (``""``: nothing is bound), and the threads that each rank may compute on."""
    # Imports torch, which the worker's entry must not do before the user's script does.
    from .. import hardware, settings
    from ..hardware import numa as found
    from ..logging import get_logger

    fair = max(1, hardware.detect(use_accelerators=False).cpu.threads // processes)
    if not numa or processes < 2 or not hasattr(os, "sched_setaffinity"):
        return "", fair
    chosen = choose(processes, found.cores(), [] if settings.resolve().cpu else found.gpus())
    if not chosen:
        return "", fair
    masks = ";".join(f"{sum(1 << core for core in each):x}" for each in chosen)
    get_logger(__name__).info(
        f"each rank runs on the cores of its NUMA node: {masks} (--no-numa: everywhere)"
    )
    return masks, min(fair, *share(chosen))


def choose(
    processes: int, nodes: dict[int, frozenset[int]], gpus: Sequence[int | None]
) -> list[frozenset[int]]:
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
        return chosen if 2 * min(share(chosen)) >= usable // processes else []
    numbers, count = sorted(nodes), len(nodes)
    chosen = []
    for rank in range(processes):
        start = rank * count // processes
        end = max(start + 1, (rank + 1) * count // processes)
        chosen.append(frozenset().union(*(nodes[number] for number in numbers[start:end])))
    return chosen if min(share(chosen)) >= usable // processes else []


def share(chosen: list[frozenset[int]]) -> list[int]:
    """Cores of each rank's own, at least 1, where several have the same ones."""
    return [max(1, len(each) // chosen.count(each)) for each in chosen]


def bind(masks: str, local_rank: int) -> None:
    """Keep this process, and all that it starts, on its cores of `masks`, such as ``"ff;ff00"``: one bit a core, as taskset has it."""
    if masks:
        mask = int(masks.split(";")[local_rank], 16)
        os.sched_setaffinity(0, {core for core in range(mask.bit_length()) if mask >> core & 1})
