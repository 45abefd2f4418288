"""Which instruction sets the processor has, of those that a decision depends on, by `CPU.features`' names.

`torch.cpu.get_capabilities` (torch 2.13) answers on every system. For older torch: its private checks, ``/proc/cpuinfo``
on Linux, sysctl on Apple Silicon, whichever is there.

Names are from torch's docstring, from Linux (arch/x86/include/asm/cpufeatures.h, Documentation/arch/arm64/elf_hwcaps.rst)
and from Apple's "Determining instruction set characteristics".
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from .procfs import apple, line, text

_X86 = {
    n: n for n in ("avx2", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "amx_int8")
}
_ARM = {n: n for n in ("i8mm", "sve", "sve2", "sme")} | {"bf16": "neon_bf16"}

CAPABILITIES = (
    _X86 | _ARM | {"avx512_f": "avx512", "neon": "neon", "sve_bf16": "sve_bf16", "fp16_arith": "neon_fp16"}
)
X86_FLAGS = _X86 | {"avx512f": "avx512"}
ARM_FLAGS = _ARM | {"asimd": "neon", "svebf16": "sve_bf16", "asimdhp": "neon_fp16"}
APPLE_KEYS = {
    "AdvSIMD": "neon",
    "FEAT_BF16": "neon_bf16",
    "FEAT_FP16": "neon_fp16",
    "FEAT_I8MM": "i8mm",
    "FEAT_SME": "sme",
}
OLDER_TORCH = {"avx2": "avx2", "avx512": "avx512", "avx512_bf16": "avx512_bf16", "amx_fp16": "amx_fp16"}


def features(root: Path) -> frozenset[str]:
    """What is here; `root` is where ``proc`` lies."""
    if hasattr(torch.cpu, "get_capabilities"):
        return from_capabilities(torch.cpu.get_capabilities())
    return _from_older_torch() | from_cpuinfo(text(root / "proc/cpuinfo")) | _from_apple()


def from_capabilities(capabilities: Mapping[str, object]) -> frozenset[str]:
    """From torch.cpu.get_capabilities()."""
    return frozenset(ours for theirs, ours in CAPABILITIES.items() if capabilities.get(theirs) is True)


def from_cpuinfo(cpuinfo: str) -> frozenset[str]:
    """From /proc/cpuinfo: x86 has a line "flags", Arm has "Features". The kernel leaves out what it has not enabled."""
    x86, arm = line(cpuinfo, "flags").split(), line(cpuinfo, "Features").split()
    return frozenset(
        [X86_FLAGS[flag] for flag in x86 if flag in X86_FLAGS]
        + [ARM_FLAGS[flag] for flag in arm if flag in ARM_FLAGS]
    )


def _from_older_torch() -> frozenset[str]:
    checks = {
        ours: getattr(torch.cpu, f"_is_{theirs}_supported", None) for theirs, ours in OLDER_TORCH.items()
    }
    return frozenset(ours for ours, check in checks.items() if check is not None and check())


def _from_apple() -> frozenset[str]:
    return frozenset(ours for theirs, ours in APPLE_KEYS.items() if apple(f"hw.optional.arm.{theirs}") == "1")
