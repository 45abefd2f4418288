"""AMD cards, which torch's ROCm build shows as "cuda". Its calls initialise HIP in this process, so fork before or not at
all; ``HIP_VISIBLE_DEVICES`` and its kin are honoured by that runtime itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from .facts import Device
from .found import Found
from .peers import by_torch

ROOT = Path("/")

# Input types of the matrix units (MFMA on Instinct, WMMA on Radeon) by the beginning of the architecture's name. From the
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


def facts_for(
    name: str, architecture: str, memory: int, index: int = 0, arch_list: Sequence[str] = ()
) -> Device:
    """What a card can do; `architecture` as torch's gcnArchName, ``"gfx942:sramecc+:xnack-"``; `memory` in bytes.

    `arch_list` is torch.cuda.get_arch_list(); empty: unknown, taken as right. AMD's code runs on its own architecture alone.
    """
    base = architecture.split(":")[0]
    units = frozenset(
        kind for beginning, kinds in MATRIX_UNITS if base.startswith(beginning) for kind in kinds
    )
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


def probe(root: Path = ROOT) -> Found:
    """The visible cards, or why there is none; `root` is where ``dev`` lies."""
    if torch.version.hip is None:
        return _none(_without_rocm(root))
    if not torch.cuda.is_available():
        return _none(f"no AMD GPU: torch {torch.__version__} is built for ROCm, but its runtime shows none")
    cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    built = torch.cuda.get_arch_list()
    devices = tuple(
        facts_for(card.name, card.gcnArchName, card.total_memory, i, built) for i, card in enumerate(cards)
    )
    missing = tuple(
        f"no code for {name} ({arch}) in this torch {torch.__version__}, built for {' '.join(built)}: "
        "install a build of torch for a ROCm that supports this card"
        for arch, name in sorted({(d.architecture, d.name) for d in devices if not d.built_for})
    )
    return Found("amd", devices, by_torch(len(devices)), missing)


def _without_rocm(root: Path) -> str:
    if (root / "dev/kfd").exists():
        return (
            f"AMD driver present, but torch {torch.__version__} has no ROCm: install the ROCm build of torch"
        )
    return f"no AMD GPU: this torch {torch.__version__} is built without ROCm"


def _none(why: str) -> Found:
    return Found("amd", missing=(why,))
