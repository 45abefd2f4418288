"""GPU models: memory, architecture and peak rates; and machines described in words, such as ``"2x8xH100"``.

The figures are the vendors', for dense products; NVIDIA's data sheets name twice as much "with sparsity" since 2020. Sources: NVIDIA's
data sheets of the GPU or of its HGX board, for GeForce and RTX cards the appendix of the architecture's white paper ("FP16 Tensor TFLOPS
with FP32 Accumulate", the way in which torch multiplies), and AMD's data sheets of Instinct accelerators ("matrix").
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..base.units import read_bytes
from ..errors import SettingError, nearest
from .accelerators import amd_facts, facts_for
from .facts import CPU, Device, Hardware

GB = 10**9
NODE = 8  # GPUs of a node, where a description names more and no nodes
# Other chips, other clocks, or a part of a chip.
VARIANTS = re.compile(r"\b(laptop|mobile|max-q|mig|ti|super|server|d|fhhl)\b")


@dataclass(frozen=True)
class GPU:
    """One model, with peak rates in TFLOP/s; 0 where there are no units for a type, or no figure."""

    name: str  # as people write it; each of its words is part of the driver's name, in this order
    memory: tuple[int, ...]  # GB (10**9 bytes), the smallest first. The driver shows up to 7% more
    architecture: str  # "sm_90" of compute capability 9.0, "gfx942" of AMD
    fp32: float
    tf32: float = 0
    fp16: float = 0
    bf16: float = 0
    fp8: float = 0

    def device(self, memory: int = 0) -> Device:
        """The facts of one such card, with `memory` bytes, or its smallest."""
        size = memory or self.memory[0] * GB
        if self.architecture.startswith("gfx"):
            return amd_facts(f"AMD {self.name}", self.architecture, size)
        digits = self.architecture.removeprefix("sm_")
        # As the driver tells models of several sizes apart.
        sized = f"-{size // GB}GB" if self.memory[1:] else ""
        return facts_for(f"NVIDIA {self.name}{sized}", (int(digits[:-1]), int(digits[-1])), size)


def _nvidia(name: str, memory: str, chip: int, fp32: float, tf32: float, half: float, fp8: float = 0) -> GPU:
    sizes = tuple(map(int, memory.split()))
    return GPU(name, sizes, f"sm_{chip}", fp32, tf32, half, half if chip >= 80 else 0, fp8)


def _amd(name: str, memory: int, chip: str, fp32: float, fp16: float, bf16: float, fp8: float = 0) -> GPU:
    return GPU(name, (memory,), chip, fp32, 0, fp16, bf16, fp8)


GPUS = (
    _nvidia("GB200", "186", 100, 80, 1250, 2500, 5000),
    _nvidia("B300", "288", 103, 75, 1125, 2250, 4500),
    _nvidia("B200", "180", 100, 75, 1125, 2250, 4500),
    _nvidia("GH200", "96 144", 90, 66.9, 494.7, 989.4, 1978.9),
    _nvidia("H200", "141", 90, 66.9, 494.7, 989.4, 1978.9),
    _nvidia("H200 NVL", "141", 90, 60, 417.5, 835.5, 1670.5),
    _nvidia("H100", "80", 90, 66.9, 494.7, 989.4, 1978.9),
    _nvidia("H100 PCIe", "80", 90, 51, 378, 756, 1513),
    _nvidia("H100 NVL", "94", 90, 60, 417.5, 835.5, 1670.5),
    _nvidia("H800", "80", 90, 66.9, 494.7, 989.4, 1978.9),
    _nvidia("H800 PCIe", "80", 90, 51, 378, 756, 1513),
    _nvidia("H20", "96", 90, 44, 74, 148, 296),
    _nvidia("A100", "40 80", 80, 19.5, 156, 312),
    _nvidia("A800", "40 80", 80, 19.5, 156, 312),
    _nvidia("A30", "24", 80, 10.3, 82, 165),
    _nvidia("A40", "48", 86, 37.4, 74.8, 149.7),
    _nvidia("A10", "24", 86, 31.2, 62.5, 125),
    _nvidia("A10G", "24", 86, 31.5, 35, 70),
    _nvidia("A2", "16", 86, 4.5, 9, 18),
    _nvidia("L40S", "48", 89, 91.6, 183, 362, 733),
    _nvidia("L40", "48", 89, 90.5, 90.5, 181, 362),
    _nvidia("L20", "48", 89, 59.8, 59.8, 119.5, 239),
    _nvidia("L4", "24", 89, 30.3, 60, 121, 242.5),
    _nvidia("RTX PRO 6000 Blackwell", "96", 120, 126, 251.9, 503.8, 1007.6),
    _nvidia("RTX 6000 Ada", "48", 89, 91.1, 182.1, 364.2, 728.5),
    _nvidia("RTX A6000", "48", 86, 38.7, 77.4, 154.8),
    _nvidia("RTX A5000", "24", 86, 27.8, 55.6, 111.1),
    _nvidia("RTX A4000", "16", 86, 19.2, 38.3, 76.7),
    _nvidia("RTX 5090", "32", 120, 104.8, 104.8, 209.5, 419),
    _nvidia("RTX 5080", "16", 120, 56.3, 56.3, 112.6, 225.1),
    _nvidia("RTX 4090", "24", 89, 82.6, 82.6, 165.2, 330.3),
    _nvidia("RTX 4080", "16", 89, 48.7, 48.7, 97.5, 194.9),
    _nvidia("RTX 3090 Ti", "24", 86, 40, 40, 80),
    _nvidia("RTX 3090", "24", 86, 35.6, 35.6, 71),
    _nvidia("RTX 3080", "10", 86, 29.8, 29.8, 59.5),
    _nvidia("RTX 2080 Ti", "11", 75, 13.4, 0, 53.8),
    _nvidia("Titan RTX", "24", 75, 16.3, 0, 130.5),
    _nvidia("Quadro RTX 8000", "48", 75, 16.3, 0, 130.5),
    _nvidia("Quadro RTX 6000", "24", 75, 16.3, 0, 130.5),
    _nvidia("T4", "16", 75, 8.1, 0, 65),
    _nvidia("V100", "16 32", 70, 15.7, 0, 125),
    _nvidia("V100 PCIe", "16 32", 70, 14, 0, 112),
    _nvidia("V100S", "32", 70, 16.4, 0, 130),
    _amd("MI355X", 288, "gfx950", 157.3, 2516.6, 2516.6, 5033.2),
    _amd("MI350X", 288, "gfx950", 144.2, 2306.9, 2306.9, 4613.7),
    _amd("MI325X", 256, "gfx942", 163.4, 1307.4, 1307.4, 2614.9),
    _amd("MI300X", 192, "gfx942", 163.4, 1307.4, 1307.4, 2614.9),
    _amd("MI300A", 128, "gfx942", 122.6, 980.6, 980.6, 1961.2),
    _amd("MI250X", 64, "gfx90a", 47.9, 191.5, 191.5),  # one of its two dies, which torch takes for a device
    _amd("MI250", 64, "gfx90a", 45.3, 181, 181),  # the same
    _amd("MI210", 64, "gfx90a", 45.3, 181, 181),
    _amd("MI100", 32, "gfx908", 46.1, 184.6, 92.3),
)


def find(name: str) -> GPU | None:
    """The model by the driver's name or a person's: ``"NVIDIA H100 80GB HBM3"``, ``"h100"``, ``"RTX-4090"``; None: not in `GPUS`."""
    found, text = None, name.lower()
    for gpu in GPUS:
        words = r"[\s_-]*".join(gpu.name.lower().split())
        met = re.search(rf"(?<![a-z0-9]){words}(?![a-z0-9])", text)
        if met and not VARIANTS.search(text[met.end() :]) and (not found or len(gpu.name) > len(found.name)):
            found = gpu
    return found


def peak_flops(name: str, precision: str) -> float | None:
    """FLOP/s of dense products in "fp32", "tf32", "fp16", "bf16" or "fp8" on the GPU called `name`; None where it is not known."""
    gpu = find(name)
    return 1e12 * getattr(gpu, precision, 0) or None if gpu else None


# -- time on links -------------------------------------------------------------------------------------------------------

# GB/s of a GPU to the others of its node in one direction: half of what vendors call NVLink or Infinity Fabric bandwidth.
FABRIC = {
    "GB200": 900, "B300": 900, "B200": 900, "GH200": 450, "H200": 450, "H200 NVL": 450, "H100": 450, "H100 NVL": 300, "H20": 450,
    "H800": 200, "A100": 300, "A800": 200, "A30": 100, "V100": 150, "MI355X": 537, "MI350X": 537, "MI325X": 448, "MI300X": 448,
}  # fmt: skip
# Of 16 lanes; others 15.75.
PCIE = {"sm_9": 63, "sm_1": 63, "gfx94": 63, "gfx95": 63, "sm_8": 31.5, "gfx90": 31.5}
NETWORK = {"B300": 100, "A100": 25, "A800": 25}  # GB/s of a GPU to other nodes, as in the vendor's DGX or HGX
REACHED = 0.8  # part of these rates that large collectives reach
LATENCY = 10e-6  # seconds of a message


def collective_seconds(kind: str, size: int, ranks: int, nodes: int, name: str) -> float | None:
    """Predict the time of one collective.

    The bytes are those of a ring, and the messages those of a tree ("Optimization of Collective Communication Operations in MPICH",
    Thakur et al., 2005). Rates are the vendors', times `REACHED`; the GPUs of a node share its network adapters, of which each has one.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", or another word for a message that arrives whole.
        size: bytes of the whole tensor.
        ranks: of the group, one a GPU.
        nodes: that they are on.
        name: of the GPU, as `find` takes it.

    Returns:
        Seconds; None where the GPU is not known.
    """
    gpu = find(name)
    if gpu is None:
        return None
    pcie = next((rate for start, rate in PCIE.items() if gpu.architecture.startswith(start)), 15.75)
    fabric = FABRIC.get(gpu.name, pcie)
    network = NETWORK.get(gpu.name, 50 if fabric >= 200 else 12.5)
    rate = fabric if nodes == 1 else min(fabric, network * ranks / nodes)
    ways = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}.get(kind)
    sent = size * (ways * (ranks - 1) / ranks if ways else 1)
    return sent / (rate * GB * REACHED) + LATENCY * math.ceil(math.log2(max(2, ranks)))


# -- time of kernels -----------------------------------------------------------------------------------------------------

# GB/s of a GPU's own memory, from the data sheets; of the first size where a model has two.
# The A100's (June 2021) has 1,555 with 40 GB, and with 80 GB 1,935 as PCIe and 2,039 as SXM; the A800 is the same chip.
MEMORY = {
    "GB200": 8000, "B300": 8000, "B200": 8000, "GH200": 4000, "H200": 4800, "H200 NVL": 4800, "H100": 3350, "H100 PCIe": 2000,
    "H100 NVL": 3900, "H800": 3350, "H800 PCIe": 2000, "H20": 4000, "A100": 1555, "A800": 1555, "A30": 933, "A40": 696, "A10": 600,
    "A10G": 600, "A2": 200, "L40S": 864, "L40": 864, "L20": 864, "L4": 300, "RTX PRO 6000 Blackwell": 1792, "RTX 6000 Ada": 960,
    "RTX A6000": 768, "RTX A5000": 768, "RTX A4000": 448, "RTX 5090": 1792, "RTX 5080": 960, "RTX 4090": 1008, "RTX 4080": 717,
    "RTX 3090 Ti": 1008, "RTX 3090": 936, "RTX 3080": 760, "RTX 2080 Ti": 616, "Titan RTX": 672, "Quadro RTX 8000": 672,
    "Quadro RTX 6000": 672, "T4": 320, "V100": 900, "V100 PCIe": 900, "V100S": 1134, "MI355X": 8000, "MI350X": 8000, "MI325X": 6000,
    "MI300X": 5300, "MI300A": 5300, "MI250X": 1638, "MI250": 1638, "MI210": 1638, "MI100": 1229,
}  # fmt: skip
# Part of the peak rate that the products of a training reach with all that lies between them: 44 to 52 % in table 1 of "Efficient
# Large-Scale Language Model Training on GPU Clusters" (arXiv:2104.04473).
ATTAINED = 0.5


def copy_seconds(size: int, name: str) -> float | None:
    """Predict the time in which the GPU called `name` reads or writes `size` bytes of its memory; None where it is not known."""
    gpu = find(name)
    if gpu is None:
        return None
    wide = gpu.name in ("A100", "A800") and re.search(r"80\s*gb", name.lower())
    rate = (1935 if "pcie" in name.lower() else 2039) if wide else MEMORY[gpu.name]
    return size / (rate * GB * REACHED)


# -- machines in words --------------------------------------------------------------------------------------------------


class Described(NamedTuple):
    """A description of other machines; `unknown` has a sentence for each thing that it leaves open."""

    hardware: Hardware  # of one node
    nodes: int
    processes: int  # of a node
    unknown: tuple[str, ...]


FORMS = "write GPUs as in 8xH100, 2x8xA100-80GB (two nodes) or 64x80GB, or processes without any as in 4xcpu"


def describe(text: str) -> Described:
    """The machines that `text` means: ``[NODESx][COUNTx]MODEL[-MEMORY]``, ``COUNTxMEMORY`` or ``COUNTxcpu[-MEMORY]``.

    Raises:
        SettingError: an unknown model, or a size that the model does not have.
    """
    form = r"\s*(?:(\d+)\s*[x×]\s*)?(?:(\d+)\s*[x×]\s*)?(.*?)[\s_-]*((?<![a-wyz\d.])\d[\d.]*\s*[kmgt]i?b)?\s*"
    found = re.fullmatch(form, text, re.IGNORECASE)
    first, second, name, memory = found.groups() if found else (None, None, "", None)
    counts = [int(number) for number in (first, second) if number]
    if not (name or memory) or 0 in counts:
        raise SettingError(f"{text!r} describes no machine: {FORMS}")
    nodes, count = counts if len(counts) == 2 else (1, *counts, 1)[:2]
    size = read_bytes(memory, f"{text}: ") if memory else 0
    unknown = ["processor, memory of the host, network"]
    if nodes * count > 1:
        unknown.append("the model: strategy auto takes fsdp where a model does not fit under ddp")
    if name.lower() == "cpu":
        unknown[0] = "instructions of the processor, by which precision auto decides"
        unknown[0] += "" if size else ", and memory"
        return Described(Hardware(CPU("not known", "", count, count, 1, size)), nodes, count, tuple(unknown))
    if len(counts) == 1 and count > NODE and count % NODE == 0:
        nodes, count = count // NODE, NODE
        rest = "-".join(filter(None, (name, memory)))
        unknown.append(f"GPUs of a node: {NODE} are assumed; {nodes // 2}x{2 * NODE}x{rest} says otherwise")
    device, said = _card(name, size, text)
    devices = tuple(replace(device, index=index) for index in range(count))
    vendor = "amd" if (device.architecture or "").startswith("gfx") else "nvidia"
    cpu = CPU("not known", "", count, count, 1, 0)
    return Described(Hardware(cpu, devices, vendor), nodes, count, (*said, *unknown))


def _card(name: str, size: int, text: str) -> tuple[Device, list[str]]:
    """The card of a description, and what it leaves open. A size alone gives the abilities that all models of that size share."""
    if not name:
        alike = [gpu for gpu in GPUS if size in (GB * gb for gb in gpu.memory)]
        if not alike:
            sizes = ", ".join(f"{gb}GB" for gb in sorted({gb for gpu in GPUS for gb in gpu.memory}))
            raise SettingError(f"{text}: no GPU that easymp knows has {size / GB:g}GB. Known sizes: {sizes}")
        every = [gpu.device(size) for gpu in alike]
        weakest = min(every, key=lambda d: (d.bf16, d.fp16, len(d.tensor_cores), d.capability or (99, 0)))
        models = ", ".join(gpu.name for gpu in alike)
        said = f"model of the GPU: those of this size are {models}; the weakest of them decides"
        return replace(weakest, name=f"a GPU of {size / GB:g} GB"), [said]
    gpu = find(name)
    if gpu is None:
        known = [gpu.name for gpu in GPUS]
        why = f"{name!r} is not a GPU that easymp knows{nearest(name, known) or '.'}"
        raise SettingError(
            f"{text}: {why} Write its memory in place of it, as in 8x80GB. Known: {', '.join(known)}"
        )
    if size and size not in (GB * gb for gb in gpu.memory):
        sizes = " or ".join(f"{gb}GB" for gb in gpu.memory)
        why = f"{gpu.name} has {sizes}, not {size / GB:g}GB; a size alone stands for any GPU"
        raise SettingError(f"{text}: {why}")
    open_ = not size and gpu.memory[1:]
    words = f"memory: {' or '.join(map(str, gpu.memory))} GB; {gpu.memory[0]} are assumed"
    return gpu.device(size), [f"{words}, {gpu.name}-{gpu.memory[-1]}GB says otherwise"] if open_ else []
