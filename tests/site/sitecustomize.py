"""Python imports this file when it starts: `easymp.hardware.cpu` then finds a recorded processor, not the real one.

Memory, cores and NUMA nodes stay the machine's.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

MODULE = "easymp.hardware.cpu"
VARIABLE, DEFAULT, REAL = "TESTS_CPU", "avx2", "real"
# Name, architecture and instructions, as `easymp.hardware.cpu.probe` records them.
CPUS = {
    "avx2": ("Intel(R) Core(TM) i7-1185G7", "x86_64", "avx2"),
    "avx512_bf16": ("AMD EPYC 9654 96-Core Processor", "x86_64", "avx2 avx512 avx512_vnni avx512_bf16"),
    "amx": (
        "Intel(R) Xeon(R) Platinum 8480C",
        "x86_64",
        "avx2 avx512 avx512_vnni avx512_bf16 avx512_fp16 amx_bf16 amx_int8",
    ),
    "neon_bf16": ("Apple M3 Max", "arm64", "neon neon_bf16 neon_fp16 i8mm"),
    "sve_bf16": ("Neoverse-V2", "aarch64", "neon neon_bf16 neon_fp16 i8mm sve sve_bf16"),
    "unknown": ("", "x86_64", ""),
}


class Finder:
    """Replaces the probe in the module as it is imported."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name != MODULE:
            return None
        sys.meta_path.remove(Finder)  # type: ignore[arg-type]
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            module.real_probe, module.probe = module.probe, recorded(module.probe)

        spec.loader.exec_module = exec_module
        return spec


def recorded(probe: Any) -> Any:
    """The probe, with the processor that `VARIABLE` names in place of the real one."""

    def recorded_probe(root: Path = Path("/")) -> Any:
        name = os.environ.get(VARIABLE, DEFAULT)
        if name == REAL or root != Path("/"):
            return probe(root)
        brand, architecture, features = CPUS[name]
        return replace(
            probe(root), name=brand or architecture, architecture=architecture, features=frozenset(features.split())
        )

    return recorded_probe


def install() -> None:
    """Wait for the import of `MODULE`."""
    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]


if __name__ == "sitecustomize":
    install()
