"""Intel GPUs. torch's calls initialise the SYCL runtime in this process, so fork before or not at all."""

from __future__ import annotations

import torch

from .facts import Device
from .found import Found


def facts_for(
    name: str, memory: int, index: int = 0, *, bf16: bool, fp16: bool, matrix: bool, tf32: bool = False
) -> Device:
    """What a GPU can do, from torch.xpu.get_device_properties; `memory` in bytes.

    `bf16` is has_bfloat16_conversions, `fp16` has_fp16 (twice the rate of fp32), `matrix` and `tf32` whether there are
    matrix units (XMX, DPAS), and for TF32. Code is compiled ahead for some models and at load for the rest, so any torch
    built for XPU fits.
    """
    units = {kind for kind, has in (("bf16", bf16), ("fp16", fp16), ("tf32", tf32)) if has and matrix}
    return Device("xpu", index, name, memory, tensor_cores=frozenset(units), bf16=bf16, fp16=fp16)


def probe() -> Found:
    """The visible GPUs, or why there is none."""
    if not torch._C._has_xpu:
        return Found("intel", missing=(f"no Intel GPU: this torch {torch.__version__} is built without XPU",))
    if not torch.xpu.is_available():
        why = f"no Intel GPU: torch {torch.__version__} is built for XPU, but the driver shows none"
        return Found("intel", missing=(why,))
    return Found("intel", tuple(_device(i) for i in range(torch.xpu.device_count())))


def _device(index: int) -> Device:
    card = torch.xpu.get_device_properties(index)
    return facts_for(
        card.name,
        card.total_memory,
        index,
        bf16=card.has_bfloat16_conversions,
        fp16=card.has_fp16,
        matrix=card.has_subgroup_matrix_multiply_accumulate,
        tf32=getattr(
            card, "has_subgroup_matrix_multiply_accumulate_tensor_float32", False
        ),  # newer than torch 2.8
    )
