"""Cores for each rank: on a machine with several NUMA nodes, those of one node, so that a rank's memory lies where it computes.

A rank with an NVIDIA GPU gets the node that its GPU hangs on, as NVML and sysfs tell. Ranks on CPUs are spread evenly, or not at all: a
rank with fewer cores than the others would hold them all up. Only cores that this process may use itself are given away, and where the
GPUs' nodes are not known nothing is.
"""

from __future__ import annotations

import os


def plan(processes: int, numa: bool = True) -> tuple[str, int]:
    """What `bind` takes (``""``: nothing is bound), and the threads that each rank may compute on."""
    # Imports torch, which the worker's entry must not do before the user's script does.
    from .. import hardware, settings
    from ..hardware import numa as found
    from ..logging import get_logger

    threads = hardware.detect(use_accelerators=False).cpu.threads
    if not numa:
        return "", max(1, threads // processes)
    chosen, fair = found.plan(processes, threads, gpus=not settings.resolve().cpu)
    if not chosen:
        return "", fair
    masks = ";".join(f"{sum(1 << core for core in each):x}" for each in chosen)
    get_logger(__name__).info(
        f"each rank runs on the cores of its NUMA node: {masks} (--no-numa: everywhere)"
    )
    return masks, fair


def bind(masks: str, local_rank: int) -> None:
    """Keep this process, and all that it starts, on its cores of `masks`, such as ``"ff;ff00"``: one bit a core, as taskset has it."""
    if masks:
        mask = int(masks.split(";")[local_rank], 16)
        os.sched_setaffinity(0, {core for core in range(mask.bit_length()) if mask >> core & 1})
