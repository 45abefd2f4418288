"""NVIDIA's architectures by compute capability: what their Tensor Cores multiply, and which compiled code they run."""

from __future__ import annotations

import re
from collections.abc import Iterable

# From this capability on, Tensor Cores take these input types. CUDA C++ Programming Guide, "Compute Capabilities", table
# "Tensor Core Input Data Types Supported per Compute Capability", and the PTX ISA (mma, tcgen05.mma with block scaling).
# On 12.x (GeForce and workstation Blackwell) the units for the block-scaled types are there, but not every kernel that
# torch has for 10.x: probe a product before relying on them.
TENSOR_CORES = (
    ((7, 0), {"fp16"}),
    ((8, 0), {"bf16", "tf32"}),
    ((8, 9), {"fp8"}),
    ((10, 0), {"mxfp8", "nvfp4"}),
)

# Chips TU116 and TU117: capability 7.5 without Tensor Cores. GTX 16 series, MX 450 and 550, T and Quadro T series, and the
# mining card CMP 30HX (TechPowerUp GPU database). "Tesla T4" is a TU104 and has them.
WITHOUT_TENSOR_CORES = re.compile(
    r"GTX 16\d\d|\bMX[45]50\b|\b(T400|T500|T550|T600|T1000|T1200|T2000)\b|\bCMP 30HX\b"
)

# Chips in boards (Jetson, Drive) whose machine code the desktop and server chips of the same major version do not share,
# as torch's own check has it (DEVICE_REQUIREMENT in torch/cuda/__init__.py).
INTEGRATED = {(5, 3), (6, 2), (7, 2), (8, 7), (10, 1)}


def tensor_cores(name: str, capability: tuple[int, int]) -> frozenset[str]:
    """Input types of this card's Tensor Cores; empty where it has none."""
    if capability == (7, 5) and WITHOUT_TENSOR_CORES.search(name):
        return frozenset()
    return frozenset(kind for since, kinds in TENSOR_CORES if capability >= since for kind in kinds)


def built_for(capability: tuple[int, int], arch_list: Iterable[str]) -> bool:
    """Whether code compiled for `arch_list`, as ``["sm_80", "sm_90a", "compute_120"]``, runs on `capability`.

    Machine code (``sm_``) runs on the same major version and the same or a later minor one; with the suffix "a" on that one
    alone. PTX (``compute_``) is compiled at load for the same or any later capability. (NVCC documentation, "GPU
    Compilation".) An empty list is unknown, and taken as right.
    """
    names = [re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch) for arch in arch_list]
    codes = [(n[1], (int(n[2]), int(n[3])), n[4]) for n in names if n]
    return not codes or any(_runs(capability, *code) for code in codes)


def _runs(capability: tuple[int, int], form: str, code: tuple[int, int], suffix: str) -> bool:
    if suffix == "a" or (form == "sm" and INTEGRATED & {capability, code}):
        return capability == code
    return code <= capability and (capability[0] == code[0] or (form == "compute" and not suffix))


def build_for(capability: tuple[int, int]) -> str:
    """Words for the build of torch that has code for this card (PYTORCH_RELEASES_CODE_CC in torch/cuda/__init__.py)."""
    if capability in INTEGRATED:
        return "NVIDIA's own build of torch for this board"
    if capability < (5, 0):
        return "torch from source: no build of today has this architecture"
    if capability < (7, 5):
        return "torch built for CUDA 12.6 (cu126), the last with this architecture"
    return "torch built for CUDA 13.0 (cu130)" if capability >= (10, 0) else "a newer torch built for CUDA"
