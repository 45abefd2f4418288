"""Ranks and what travels between them: whether collectives give the right answers, and how fast."""

from __future__ import annotations

import time

import torch

from ...accelerator import Accelerator
from ...base.units import size
from ...training.collectives import broadcast, gather_object
from .findings import LeftOut, Wrong

BYTES = 32 << 20
ROUNDS = 5


def collectives(acc: Accelerator) -> str:
    """Sum, gather and broadcast of numbers, and gather of objects, all of which each rank knows for all."""
    rank, ranks = acc.process_index, acc.num_processes
    mine = torch.full((3,), float(rank + 1), device=acc.device)
    total = acc.reduce(mine, "sum")
    want = float(ranks * (ranks + 1) // 2)
    if total.tolist() != [want] * 3:
        raise Wrong(f"the sum of 1 … {ranks} over the ranks came out as {total.tolist()}, not {want:g}")
    gathered = acc.gather(torch.tensor([rank], device=acc.device)).tolist()
    if gathered != list(range(ranks)):
        raise Wrong(f"the ranks' numbers were gathered as {gathered}, not {list(range(ranks))}")
    sent = [
        broadcast(torch.tensor([rank], device=acc.device), from_process=root).item() for root in range(ranks)
    ]
    if sent != list(range(ranks)):
        raise Wrong(f"the ranks' numbers were broadcast as {sent}, not {list(range(ranks))}")
    objects = gather_object([f"rank {rank}"])
    if objects != [f"rank {i}" for i in range(ranks)]:
        raise Wrong(f"the ranks' names were gathered as {objects}")
    acc.wait_for_everyone()
    devices = acc.gather(torch.tensor([acc.device.index or 0], device=acc.device)).tolist()
    kind = acc.device.type
    return f"{ranks} rank{'s' * (ranks > 1)} on {kind}" + (
        f" {', '.join(map(str, devices))}" if kind == "cuda" else ""
    )


def bandwidth(acc: Accelerator) -> str:
    """An all-reduce of 32 MiB of fp32; bus bandwidth as NCCL's tests count it, 2 (n - 1) / n × bytes / time."""
    ranks = acc.num_processes
    if ranks == 1:
        raise LeftOut("one process has nobody to send to")
    block = torch.ones(BYTES // 4, device=acc.device)
    times = []
    for _ in range(ROUNDS + 1):
        acc.wait_for_everyone()
        begin = time.perf_counter()
        answer = acc.reduce(block, "sum")
        value = answer[-1].item()  # waits for the device
        times.append(time.perf_counter() - begin)
        if value != ranks:
            raise Wrong(f"ones summed over {ranks} ranks came out as {value:g}")
    middle = sorted(times[1:])[ROUNDS // 2]
    return f"{size(int(2 * (ranks - 1) / ranks * BYTES / middle))}/s between ranks ({size(BYTES)} in {middle * 1e3:.0f} ms)"
