"""The GPU of Apple Silicon, by Metal Performance Shaders."""

from __future__ import annotations

import re

import torch

from .cpu import name as processor
from .facts import Device
from .found import Found


def facts_for(chip: str, memory: int) -> Device:
    """What the GPU of this `chip`, as ``"Apple M2 Max"``, can do; `memory` in bytes.

    bf16 runs everywhere from macOS 14 on, but before the M3 Metal emulates it with fp32. fp16 has about fp32's rate at half
    the memory: whether it gains is a matter of measuring, so the facts claim nothing.
    """
    generation = re.search(r"\bM(\d+)", chip)
    return Device("mps", 0, f"{chip} GPU", memory, bf16=bool(generation) and int(generation[1]) >= 3)


def probe() -> Found:
    """The GPU, or why there is none. `memory` is what Metal recommends to use at most of the memory shared with the CPU."""
    if not torch.backends.mps.is_built():
        return Found("apple", missing=(f"no Apple GPU: this torch {torch.__version__} is built without MPS",))
    if not torch.backends.mps.is_available():
        why = f"no Apple GPU: torch {torch.__version__} is built for MPS, but it needs Apple Silicon and macOS 14 or newer"
        return Found("apple", missing=(why,))
    return Found("apple", (facts_for(processor() or "Apple", torch.mps.recommended_max_memory()),))
