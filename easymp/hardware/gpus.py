"""GPU models, with memory and architecture; and machines described in words, such as ``"2x8xH100"``.

Sources: the data sheets of NVIDIA's GPUs and of AMD's Instinct accelerators.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from ..base.units import read_bytes
from ..errors import SettingError, nearest
from .accelerators import Device, Hardware, amd_device, nvidia_device
from .cpu import CPU

GB = 10**9
GPUS_PER_NODE = 8  # where a description names more and no nodes
# Other chips, other clocks, or a part of a chip.
VARIANTS = re.compile(r"\b(laptop|mobile|max-q|mig|ti|super|server|d|fhhl)\b")
FORMS = "write GPUs as in 8xH100, 2x8xA100-80GB (two nodes) or 64x80GB, or processes without any as in 4xcpu"


class GPU(NamedTuple):
    """One model."""

    name: str  # as people write it; each of its words is part of the driver's name, in this order
    memory: tuple[int, ...]  # GB (10**9 bytes), the smallest first. The driver shows up to 7% more
    architecture: str  # "sm_90" of compute capability 9.0, "gfx942" of AMD

    def device(self, memory: int = 0) -> Device:
        """The facts of one such card, with `memory` bytes, or its smallest."""
        memory = memory or self.memory[0] * GB
        if self.architecture.startswith("gfx"):
            return amd_device(f"AMD {self.name}", self.architecture, memory)
        major, minor = divmod(int(self.architecture.removeprefix("sm_")), 10)
        suffix = f"-{memory // GB}GB" if self.memory[1:] else ""  # as the driver tells models of several sizes apart
        return nvidia_device(f"NVIDIA {self.name}{suffix}", (major, minor), memory)


# Architecture → models, with memory in GB. torch takes each of the two dies of MI250X and MI250 for a device.
MODELS = {
    "sm_103": "B300 288",
    "sm_100": "GB200 186, B200 180",
    "sm_90": "GH200 96/144, H200 141, H200 NVL 141, H100 80, H100 PCIe 80, H100 NVL 94, H800 80, H800 PCIe 80, H20 96",
    "sm_80": "A100 40/80, A800 40/80, A30 24",
    "sm_86": "A40 48, A10 24, A10G 24, A2 16, RTX A6000 48, RTX A5000 24, RTX A4000 16, RTX 3090 Ti 24, RTX 3090 24, "
    "RTX 3080 10",
    "sm_89": "L40S 48, L40 48, L20 48, L4 24, RTX 6000 Ada 48, RTX 4090 24, RTX 4080 16",
    "sm_120": "RTX PRO 6000 Blackwell 96, RTX 5090 32, RTX 5080 16",
    "sm_75": "T4 16, RTX 2080 Ti 11, Titan RTX 24, Quadro RTX 8000 48, Quadro RTX 6000 24",
    "sm_70": "V100 16/32, V100 PCIe 16/32, V100S 32",
    "gfx950": "MI355X 288, MI350X 288",
    "gfx942": "MI325X 256, MI300X 192, MI300A 128",
    "gfx90a": "MI250X 64, MI250 64, MI210 64",
    "gfx908": "MI100 32",
}
GPUS = tuple(
    GPU(name, tuple(map(int, sizes.split("/"))), architecture)
    for architecture, models in MODELS.items()
    for name, _, sizes in (model.rpartition(" ") for model in models.split(", "))
)


def find_model(name: str) -> GPU | None:
    """The model by the driver's name or a person's: ``"NVIDIA H100 80GB HBM3"``, ``"h100"``, ``"RTX-4090"``."""
    matches = []
    for gpu in GPUS:
        pattern = r"[\s_-]*".join(gpu.name.lower().split())
        match = re.search(rf"(?<![a-z0-9]){pattern}(?![a-z0-9])", name.lower())
        if match and not VARIANTS.search(name.lower()[match.end() :]):
            matches.append(gpu)
    return max(matches, key=lambda gpu: len(gpu.name), default=None)


# -- machines in words -------------------------------------------------------------------------------------------------


class Described(NamedTuple):
    """A description of other machines; `unknown` has a sentence for each thing that it leaves open."""

    hardware: Hardware  # of one node
    nodes: int
    processes: int  # of a node
    unknown: tuple[str, ...]


def describe(text: str) -> Described:
    """The machines that `text` means: ``[NODESx][COUNTx]MODEL[-MEMORY]``, ``COUNTxMEMORY`` or ``COUNTxcpu[-MEMORY]``.

    Raises:
        SettingError: an unknown model, or a size that the model does not have.
    """
    form = r"\s*(?:(\d+)\s*[x×]\s*)?(?:(\d+)\s*[x×]\s*)?(.*?)[\s_-]*((?<![a-wyz\d.])\d[\d.]*\s*[kmgt]i?b)?\s*"
    match = re.fullmatch(form, text, re.IGNORECASE)
    nodes_text, count_text, name, memory = match.groups() if match else (None, None, "", None)
    counts = [int(number) for number in (nodes_text, count_text) if number]
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
    if len(counts) == 1 and count > GPUS_PER_NODE and count % GPUS_PER_NODE == 0:
        nodes, count = count // GPUS_PER_NODE, GPUS_PER_NODE
        model = "-".join(filter(None, (name, memory)))
        unknown.append(f"GPUs of a node: {count} are assumed; {nodes // 2}x{2 * GPUS_PER_NODE}x{model} says otherwise")
    device, unknown_of_card = _describe_card(name, size, text)
    devices = tuple(replace(device, index=index) for index in range(count))
    vendor = "amd" if (device.architecture or "").startswith("gfx") else "nvidia"
    cpu = CPU("not known", "", count, count, 1, 0)
    return Described(Hardware(cpu, devices, vendor), nodes, count, (*unknown_of_card, *unknown))


def _describe_card(name: str, size: int, text: str) -> tuple[Device, list[str]]:
    """The card of a description, and what that leaves open. Without a name: the weakest card of that size."""
    if not name:
        gpus = [gpu for gpu in GPUS if size in (GB * gb for gb in gpu.memory)]
        if not gpus:
            sizes = ", ".join(f"{gb}GB" for gb in sorted({gb for gpu in GPUS for gb in gpu.memory}))
            raise SettingError(f"{text}: no GPU that easymp knows has {size / GB:g}GB. Known sizes: {sizes}")
        devices = [gpu.device(size) for gpu in gpus]
        weakest = min(devices, key=lambda d: (d.bf16, d.fp16, len(d.tensor_cores), d.capability or (99, 0)))
        models = ", ".join(gpu.name for gpu in gpus)
        unknown = f"model of the GPU: those of this size are {models}; the weakest of them decides"
        return replace(weakest, name=f"a GPU of {size / GB:g} GB"), [unknown]
    model = find_model(name)
    if model is None:
        names = [gpu.name for gpu in GPUS]
        problem = f"{name!r} is not a GPU that easymp knows{nearest(name, names) or '.'}"
        remedy = f"Write its memory in place of it, as in 8x80GB. Known: {', '.join(names)}"
        raise SettingError(f"{text}: {problem} {remedy}")
    if size and size not in (GB * gb for gb in model.memory):
        sizes = " or ".join(f"{gb}GB" for gb in model.memory)
        raise SettingError(f"{text}: {model.name} has {sizes}, not {size / GB:g}GB; a size alone stands for any GPU")
    if size or not model.memory[1:]:
        return model.device(size), []
    sizes = " or ".join(map(str, model.memory))
    unknown = f"memory: {sizes} GB; {model.memory[0]} are assumed, {model.name}-{model.memory[-1]}GB says otherwise"
    return model.device(), [unknown]
