"""Out of memory: let go, and try again with less, all ranks together."""

from __future__ import annotations

import gc
from typing import Any

import torch


def release_memory(*objects: Any, device: torch.device | None = None) -> list[None]:
    """Drop `objects` (assign the Nones returned), collect garbage, and give cached device memory back."""
    nothing: list[None] = [None] * len(objects)
    del objects
    gc.collect()
    kind = device.type if device is not None else "cuda" if torch.cuda.is_initialized() else "cpu"
    if kind == "cuda":
        torch.cuda.empty_cache()
    elif kind == "xpu":
        torch.xpu.empty_cache()
    elif kind == "mps":
        torch.mps.empty_cache()
    return nothing
