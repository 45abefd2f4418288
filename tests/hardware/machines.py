"""Machines that are not here, as their probes would record them. Memory is what torch shows, to a hundredth of a GiB.

Written out, not derived: test_accelerators.py holds the derivations against this table, and other tests decide from it.
"""

from easymp import Hardware
from easymp.hardware import CPU, Device

from ..site import CPUS

GIB = 2**30
AMPERE = frozenset({"fp16", "bf16", "tf32"})
HOPPER = AMPERE | {"fp8"}


def _gib(size: float) -> int:
    return int(size * GIB)


def _recorded(processor: str, cores: int, threads: int, nodes: int, gib: float) -> CPU:
    name, architecture, features = CPUS[processor]
    return CPU(name, architecture, cores, threads, nodes, _gib(gib), frozenset(features.split()))


LAPTOP = _recorded("avx2", 4, 8, 1, 15.4)
GENOA = _recorded("avx512_bf16", 192, 384, 2, 1511.0)
SAPPHIRE = _recorded("amx", 112, 224, 2, 2015.0)
GRAVITON = _recorded("sve_bf16", 64, 64, 1, 247.0)
M3 = _recorded("neon_bf16", 16, 16, 1, 64.0)
CLOUD = CPU("Intel(R) Xeon(R) CPU @ 2.20GHz", "x86_64", 4, 8, 1, _gib(51.0), LAPTOP.features)
XEON = CPU("Intel(R) Xeon(R) Gold 6248", "x86_64", 40, 80, 2, _gib(376.0), GENOA.features - {"avx512_bf16"})
EPYC = CPU("AMD EPYC 7742 64-Core Processor", "x86_64", 128, 256, 8, _gib(1007.0), LAPTOP.features)
GRANITE = CPU("Intel(R) Xeon(R) 6960P", "x86_64", 144, 288, 4, _gib(2267.0), SAPPHIRE.features | {"amx_fp16"})


def _nvidia(cpu: CPU, name: str, capability: tuple[int, int], gib: float, cores: frozenset[str], count=1) -> Hardware:
    arch = f"sm_{capability[0]}{capability[1]}"
    units = {"tensor_cores": cores, "bf16": "bf16" in cores, "fp16": "fp16" in cores}
    cards = tuple(Device("cuda", i, name, _gib(gib), capability, arch, **units) for i in range(count))
    return Hardware(cpu, cards, "nvidia")


def _machine_with(cpu: CPU, vendor: str, device: Device) -> Hardware:
    missing = ("no NVIDIA GPU: this torch 2.13.0 is built without CUDA",)
    return Hardware(cpu, (device,), vendor, looked_for=missing)


def _cpu(cpu: CPU) -> Hardware:
    vendors = (("NVIDIA", "CUDA"), ("AMD", "ROCm"), ("Intel", "XPU"), ("Apple", "MPS"))
    missing = "no {} GPU: this torch 2.13.0+cpu is built without {}"
    return Hardware(cpu, looked_for=tuple(missing.format(*vendor) for vendor in vendors))


HALF = {"bf16": True, "fp16": True}
CDNA = frozenset({"fp16", "bf16", "fp8"})
MI300X = Device("cuda", 0, "AMD Instinct MI300X", _gib(191.69), None, "gfx942", CDNA, **HALF)
MAX_1550 = Device("xpu", 0, "Intel(R) Data Center GPU Max 1550", _gib(64.0), tensor_cores=AMPERE, **HALF)
MACHINES: dict[str, Hardware] = {
    "P100": _nvidia(XEON, "Tesla P100-PCIE-16GB", (6, 0), 15.89, frozenset()),
    "V100": _nvidia(XEON, "Tesla V100-SXM2-16GB", (7, 0), 15.77, frozenset({"fp16"})),
    "T4": _nvidia(CLOUD, "Tesla T4", (7, 5), 14.56, frozenset({"fp16"})),
    "GTX 1660": _nvidia(LAPTOP, "NVIDIA GeForce GTX 1660 Ti", (7, 5), 5.80, frozenset()),
    "A100": _nvidia(EPYC, "NVIDIA A100-SXM4-40GB", (8, 0), 39.49, AMPERE),
    "2xA100 NVLink": _nvidia(EPYC, "NVIDIA A100-SXM4-80GB", (8, 0), 79.25, AMPERE, 2),
    "2xRTX 3090": _nvidia(LAPTOP, "NVIDIA GeForce RTX 3090", (8, 6), 23.58, AMPERE, 2),
    "L4": _nvidia(CLOUD, "NVIDIA L4", (8, 9), 22.05, HOPPER),
    "H100": _nvidia(SAPPHIRE, "NVIDIA H100 80GB HBM3", (9, 0), 79.11, HOPPER),
    "8xH100": _nvidia(SAPPHIRE, "NVIDIA H100 80GB HBM3", (9, 0), 79.11, HOPPER, 8),
    "B200": _nvidia(GRANITE, "NVIDIA B200", (10, 0), 178.35, HOPPER),
    "RTX 5090": _nvidia(LAPTOP, "NVIDIA GeForce RTX 5090", (12, 0), 31.36, HOPPER),
    "MI300X": _machine_with(GENOA, "amd", MI300X),
    "Intel XPU": _machine_with(SAPPHIRE, "intel", MAX_1550),
    "M-series Mac": _machine_with(M3, "apple", Device("mps", 0, "Apple M3 Max GPU", _gib(48.0), bf16=True)),
    "laptop CPU": _cpu(LAPTOP),
    "Zen 4 server": _cpu(GENOA),
    "Sapphire Rapids": _cpu(SAPPHIRE),
    "Graviton 4": _cpu(GRAVITON),
}
