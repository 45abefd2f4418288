"""`detect`, which probes each vendor's accelerators once a process, and the probes of AMD, Intel and Apple.

torch's calls for AMD and Intel initialise their runtime in this process, which must not fork afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..base import env
from . import cpu, nvidia
from .facts import Device, Found, Hardware

ROOT = Path("/")

# Input types of AMD's matrix units (MFMA on Instinct, WMMA on Radeon) by the beginning of the architecture's name. From the
# ROCm documentation, "Precision support" and "GPU hardware specifications". fp8 is the fnuz form on gfx940 to gfx942 and
# OCP's elsewhere. No TF32: gfx942 has it, but torch uses it only behind an environment variable of hipBLASLt.
MATRIX_UNITS = (
    ("gfx908", {"fp16", "bf16"}),
    ("gfx90a", {"fp16", "bf16"}),
    ("gfx94", {"fp16", "bf16", "fp8"}),
    ("gfx950", {"fp16", "bf16", "fp8", "mxfp8"}),
    ("gfx11", {"fp16", "bf16"}),
    ("gfx12", {"fp16", "bf16", "fp8"}),
)


def amd_facts(
    name: str, architecture: str, memory: int, index: int = 0, arch_list: Sequence[str] = ()
) -> Device:
    """The abilities of an AMD card; `architecture` as torch's gcnArchName, ``"gfx942:sramecc+:xnack-"``; `memory` in bytes.

    `arch_list` is torch.cuda.get_arch_list(); empty: unknown, taken as right. AMD's code runs on its own architecture alone.
    """
    base = architecture.split(":")[0]
    units = frozenset(kind for start, kinds in MATRIX_UNITS if base.startswith(start) for kind in kinds)
    return Device(
        kind="cuda",
        index=index,
        name=name,
        memory=memory,
        architecture=base,
        tensor_cores=units,
        bf16="bf16" in units,
        fp16="fp16" in units,
        built_for=not arch_list or base in {arch.split(":")[0] for arch in arch_list},
    )


def probe_amd(root: Path = ROOT) -> Found:
    """The visible AMD cards, or why there is none; `root` is the folder with ``dev``."""
    version = torch.__version__
    if torch.version.hip is None and (root / "dev/kfd").exists():
        why = f"AMD driver present, but torch {version} has no ROCm: install the ROCm build of torch"
        return Found("amd", missing=(why,))
    if torch.version.hip is None:
        return Found("amd", missing=(f"no AMD GPU: this torch {version} is built without ROCm",))
    if not torch.cuda.is_available():
        why = f"no AMD GPU: torch {version} is built for ROCm, but its runtime shows none"
        return Found("amd", missing=(why,))
    cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    built = torch.cuda.get_arch_list()
    devices = tuple(amd_facts(c.name, c.gcnArchName, c.total_memory, i, built) for i, c in enumerate(cards))
    missing = nvidia.no_code(devices, built, lambda d: "a build of torch for a ROCm that supports this card")
    return Found("amd", devices, nvidia.links_by_torch(len(devices)), missing)


def probe_intel() -> Found:
    """The visible Intel GPUs, or why there is none."""
    if not torch._C._has_xpu:
        return Found("intel", missing=(f"no Intel GPU: this torch {torch.__version__} is built without XPU",))
    if not torch.xpu.is_available():
        why = f"no Intel GPU: torch {torch.__version__} is built for XPU, but the driver shows none"
        return Found("intel", missing=(why,))
    cards = [torch.xpu.get_device_properties(i) for i in range(torch.xpu.device_count())]
    return Found("intel", tuple(intel_facts(card, i) for i, card in enumerate(cards)))


def intel_facts(card: Any, index: int = 0) -> Device:
    """The abilities of an Intel GPU, from torch.xpu.get_device_properties.

    has_fp16 means twice the rate of fp32; subgroup matrix units are XMX and DPAS. Code is compiled ahead for some models
    and at load for the rest, so any torch built for XPU fits.
    """
    matrix = "has_subgroup_matrix_multiply_accumulate"
    tf32 = getattr(card, f"{matrix}_tensor_float32", False)  # newer than torch 2.8
    types = (("bf16", card.has_bfloat16_conversions), ("fp16", card.has_fp16), ("tf32", tf32))
    return Device(
        "xpu",
        index,
        card.name,
        card.total_memory,
        tensor_cores=frozenset(kind for kind, has in types if has and getattr(card, matrix)),
        bf16=card.has_bfloat16_conversions,
        fp16=card.has_fp16,
    )


def apple_facts(chip: str, memory: int) -> Device:
    """The abilities of the GPU of a `chip`, such as ``"Apple M2 Max"``; `memory` in bytes.

    From macOS 14 on bf16 runs on every chip, but Metal emulates it with fp32 before the M3. fp16 has about fp32's rate at half the
    memory. A gain has to be measured, so neither counts as fast here.
    """
    generation = re.search(r"\bM(\d+)", chip)
    return Device("mps", 0, f"{chip} GPU", memory, bf16=bool(generation) and int(generation[1]) >= 3)


def probe_apple() -> Found:
    """The GPU of Apple Silicon, or why there is none. `memory` is the most that Metal recommends to use of the shared memory."""
    if not torch.backends.mps.is_built():
        return Found("apple", missing=(f"no Apple GPU: this torch {torch.__version__} is built without MPS",))
    if not torch.backends.mps.is_available():
        why = f"no Apple GPU: torch {torch.__version__} is built for MPS, but it needs Apple Silicon and macOS 14 or newer"
        return Found("apple", missing=(why,))
    return Found("apple", (apple_facts(cpu.name() or "Apple", torch.mps.recommended_max_memory()),))


PROBES = (nvidia.probe, probe_amd, probe_intel, probe_apple)  # the first that finds something wins


def detect(use_accelerators: bool = True) -> Hardware:
    """Look at this machine, as this process may use it.

    The answer is kept for the process, and renewed where ``CUDA_VISIBLE_DEVICES`` has changed. A missing accelerator is not an error:
    `Hardware.looked_for` gives the reason.

    Args:
        use_accelerators: False looks at the processor only.

    Returns:
        The facts.

    Example:
        >>> detect(use_accelerators=False).devices
        ()
    """
    return _detect(bool(use_accelerators), env.read("CUDA_VISIBLE_DEVICES"))


@cache
def _detect(use_accelerators: bool, visible: str | None) -> Hardware:
    processor = cpu.probe()
    if not use_accelerators:
        return Hardware(processor, looked_for=("no accelerator was looked for, as asked",))
    missing: list[str] = []
    for probe in PROBES:
        found = probe()
        missing.extend(found.missing)
        if found.devices:
            return Hardware(processor, found.devices, found.vendor, found.links, tuple(missing))
    return Hardware(processor, looked_for=tuple(missing))
