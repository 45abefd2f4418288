"""The accelerators of this machine (`detect`), and those of machines in words, such as ``"2x8xH100"`` (`describe`).

NVIDIA's cards are read by NVML, with the optional package ``nvidia-ml-py``: CUDA stays uninitialised, and the process
may still fork. Without it, and for AMD and Intel, torch is asked, which initialises their runtime here.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..base import env
from ..base.units import read_bytes
from ..errors import SettingError, nearest
from . import cpu
from .cpu import CPU, ROOT

INSTALL = "pytorch.org/get-started/locally"

# From this capability on, Tensor Cores take these input types. CUDA C++ Programming Guide, "Compute Capabilities",
# table "Tensor Core Input Data Types Supported per Compute Capability", and the PTX ISA (mma, tcgen05.mma).
TENSOR_CORES = (((7, 0), {"fp16"}), ((8, 0), {"bf16", "tf32"}), ((8, 9), {"fp8"}))

# Chips TU116 and TU117: capability 7.5 without Tensor Cores. GTX 16 series, MX 450 and 550, T and Quadro T series, and
# the mining card CMP 30HX (TechPowerUp GPU database). "Tesla T4" is a TU104 and has them.
WITHOUT_TENSOR_CORES = re.compile(r"GTX 16\d\d|\bMX[45]50\b|\b(T400|T500|T550|T600|T1000|T1200|T2000)\b|\bCMP 30HX\b")

# Chips in boards (Jetson, Drive): desktop and server chips of the same major version do not run their machine code,
# as torch's own check has it (DEVICE_REQUIREMENT in torch/cuda/__init__.py).
INTEGRATED = {(5, 3), (6, 2), (7, 2), (8, 7), (10, 1)}

# Input types of AMD's matrix units (MFMA on Instinct, WMMA on Radeon) by the beginning of the architecture's name. From
# the ROCm documentation, "Precision support" and "GPU hardware specifications". fp8 is the fnuz form on gfx940 to
# gfx942 and OCP's elsewhere. No TF32: gfx942 has it, but torch uses it only behind an environment variable of
# hipBLASLt.
MATRIX_UNITS = {
    ("gfx908", "gfx90a", "gfx11"): {"fp16", "bf16"},
    ("gfx94", "gfx950", "gfx12"): {"fp16", "bf16", "fp8"},
}


@dataclass(frozen=True)
class Device:
    """One accelerator."""

    kind: str  # torch's device type: "cuda" (NVIDIA and AMD), "xpu", "mps"
    index: int
    name: str
    memory: int
    capability: tuple[int, int] | None = None  # NVIDIA only
    architecture: str | None = None  # "sm_80", "gfx942" …
    tensor_cores: frozenset[str] = frozenset()  # of "fp16", "bf16", "tf32", "fp8"
    bf16: bool = False  # native, not emulated
    fp16: bool = False  # faster than fp32
    built_for: bool = True  # whether this torch has code for the architecture

    @property
    def tf32(self) -> bool:
        return "tf32" in self.tensor_cores

    @property
    def fp8(self) -> bool:
        return "fp8" in self.tensor_cores


@dataclass(frozen=True)
class Hardware:
    """One machine.

    Attributes:
        cpu: the processor.
        devices: the visible accelerators, all of one kind.
        vendor: of the accelerators: "nvidia", "amd", "intel", "apple" or "none".
        looked_for: a sentence for each kind of hardware that was not found.

    Example:
        >>> detect(use_accelerators=False).kind
        'cpu'
    """

    cpu: CPU
    devices: tuple[Device, ...] = ()
    vendor: str = "none"
    looked_for: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """torch's device type of the accelerators here, or ``"cpu"``."""
        return self.devices[0].kind if self.devices else "cpu"


class Probe(NamedTuple):
    """The devices that a probe found, in the words of `Hardware`."""

    devices: tuple[Device, ...]
    missing: tuple[str, ...] = ()  # sentences on devices that this torch has no code for


# -- NVIDIA ------------------------------------------------------------------------------------------------------------


def nvidia_device(
    name: str, capability: tuple[int, int], memory: int, index: int = 0, arch_list: Sequence[str] = ()
) -> Device:
    """The abilities of a card with `memory` bytes. `arch_list` is torch.cuda.get_arch_list(); empty means unknown."""
    # bf16: units that compute in it, not the emulation that torch.cuda.is_bf16_supported() counts. fp16: Tensor Cores,
    # without which autocast gains nothing, and GTX 16 cards give NaN in convolutions.
    units: set[str] = set()
    if capability != (7, 5) or not WITHOUT_TENSOR_CORES.search(name):
        units = {dtype for since, dtypes in TENSOR_CORES if capability >= since for dtype in dtypes}
    return Device(
        kind="cuda",
        index=index,
        name=name,
        memory=memory,
        capability=capability,
        architecture=f"sm_{capability[0]}{capability[1]}",
        tensor_cores=frozenset(units),
        bf16="bf16" in units,
        fp16="fp16" in units,
        built_for=is_built_for(capability, arch_list),
    )


def is_built_for(capability: tuple[int, int], arch_list: Iterable[str]) -> bool:
    """Whether code compiled for `arch_list`, as ``["sm_80", "sm_90a", "compute_120"]``, runs on `capability`."""
    # NVCC documentation, "GPU Compilation": machine code (sm_) runs on the same major version and the same or a later
    # minor one, with the suffix "a" on that one alone; PTX (compute_) is compiled at load for any later capability.
    codes = [code for arch in arch_list if (code := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch))]
    for form, major, minor, suffix in (code.groups() for code in codes):
        minimum = int(major), int(minor)
        if suffix == "a" or (form == "sm" and INTEGRATED & {capability, minimum}):
            runs = capability == minimum
        else:
            is_portable = form == "compute" and not suffix
            runs = minimum <= capability and (capability[0] == minimum[0] or is_portable)
        if runs:
            return True
    return not codes


def build_for(device: Device) -> str:
    """The build of torch that has code for a card (PYTORCH_RELEASES_CODE_CC in torch/cuda/__init__.py)."""
    if device.capability is None:
        return "a build of torch for a ROCm that supports this card"
    if device.capability in INTEGRATED:
        return "NVIDIA's own build of torch for this board"
    if device.capability < (5, 0):
        return "torch from source: no build of today has this architecture"
    if device.capability < (7, 5):
        return "torch built for CUDA 12.6 (cu126), the last with this architecture"
    return "torch built for CUDA 13.0 (cu130)" if device.capability >= (10, 0) else "a newer torch built for CUDA"


def missing_code(devices: Sequence[Device], arch_list: Sequence[str]) -> tuple[str, ...]:
    """A sentence for each kind of card that this torch has no code for."""
    torch_build = f"this torch {torch.__version__}, built for {' '.join(arch_list)}"
    by_name = {device.name: device for device in devices if not device.built_for}
    return tuple(
        f"no code for {name} ({device.architecture}) in {torch_build}: install {build_for(device)}"
        for name, device in by_name.items()
    )


def probe_nvidia(root: Path = ROOT) -> Probe | str:
    """The visible cards, or why there is none; `root` is the folder with ``proc``."""
    version, visible_devices = torch.__version__, env.read("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None:
        if (root / "proc/driver/nvidia/version").exists():
            build = f"install the CUDA build of torch ({INSTALL})"
            return f"NVIDIA driver present, but torch {version} has no CUDA: {build}"
        return f"no NVIDIA GPU: this torch {version} is built without CUDA"
    driver = read_nvml()
    if driver is None:
        with warnings.catch_warnings(record=True) as caught:  # torch says why there is no device in a warning
            warnings.simplefilter("always")
            if not torch.cuda.is_available():
                setting = f" (CUDA_VISIBLE_DEVICES={visible_devices!r})" if visible_devices is not None else ""
                reason = str(caught[0].message).split("(Triggered")[0].strip().rstrip(".") if caught else ""
                return f"no NVIDIA GPU{setting}: {reason or 'the driver shows none or is not there'}"
        properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return _nvidia_probe([(card.name, (card.major, card.minor), card.total_memory) for card in properties])
    if not driver.cards:
        if driver.total and visible_devices is not None:
            return f"no NVIDIA GPU: CUDA_VISIBLE_DEVICES={visible_devices!r} shows none of the {driver.total} here"
        return "no NVIDIA GPU: the driver lists none"
    # Within one major version any driver runs any minor one (CUDA Compatibility, "Minor Version Compatibility").
    if driver.cuda[0] < int(torch.version.cuda.split(".")[0]):
        return (
            f"NVIDIA driver {driver.version} runs CUDA {driver.cuda[0]}.{driver.cuda[1]}, but torch {version} needs "
            f"CUDA {torch.version.cuda}: update the driver or install torch built for CUDA {driver.cuda[0]} ({INSTALL})"
        )
    return _nvidia_probe([(card.name, card.capability, card.memory) for card in driver.cards])


def _nvidia_probe(cards: Sequence[tuple[str, tuple[int, int], int]]) -> Probe:
    # torch.cuda.get_arch_list() before 2.9 asks is_available() first, which wakes the driver; the flags do not.
    flags = getattr(torch._C, "_cuda_getArchFlags", None)
    arch_list = (flags() or "").split() if flags else torch.cuda.get_arch_list()
    devices = tuple(nvidia_device(*card, i, arch_list) for i, card in enumerate(cards))
    return Probe(devices, missing_code(devices, arch_list))


# -- NVML --------------------------------------------------------------------------------------------------------------


class Card(NamedTuple):
    """A card as NVML describes it."""

    handle: Any  # NVML's
    uuid: str  # "GPU-…"
    name: str
    capability: tuple[int, int]
    memory: int


class Driver(NamedTuple):
    """The answers of NVML."""

    cards: tuple[Card, ...]  # the visible ones
    total: int  # cards of the machine
    cuda: tuple[int, int]  # newest CUDA that the driver can run
    version: str


def read_nvml() -> Driver | None:
    """The cards that CUDA will show; None without package or driver, or where cards are divided or of unknown order."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        cards = [_read_card(pynvml, handle) for handle in handles]
        # NVML counts in the order of the PCI bus, CUDA by default from the fastest card on: of unlike cards an index
        # means the same to both only under CUDA_DEVICE_ORDER=PCI_BUS_ID.
        entries: list[Any] = torch.cuda._parse_visible_devices()
        by_index = not entries or isinstance(entries[0], int)
        if len({card.name for card in cards}) > 1 and by_index and env.read("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            return None
        if by_index:
            indices = list(takewhile(lambda index: index < len(cards), entries))
        elif entries[0].startswith("MIG-"):
            return None
        else:
            indices = torch.cuda._transform_uuid_to_ordinals(entries, [card.uuid for card in cards])
        visible = tuple(cards[index] for index in indices)
        if any(_is_divided(pynvml, card.handle) for card in visible):
            return None
        cuda_version = pynvml.nvmlSystemGetCudaDriverVersion_v2()  # 12040 is 12.4
        return Driver(
            visible,
            total=len(cards),
            cuda=(cuda_version // 1000, cuda_version % 1000 // 10),
            version=_string(pynvml.nvmlSystemGetDriverVersion()),
        )
    except (pynvml.NVMLError, AttributeError, TypeError):
        return None  # a card that does not answer; a pynvml too old for a call
    finally:
        pynvml.nvmlShutdown()


def _read_card(nvml: Any, handle: Any) -> Card:
    try:  # CUDA shows NVML's total without the driver's reserve, which only the second version tells apart
        info = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        memory = info.total - info.reserved
    except nvml.NVMLError:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle).total
    return Card(
        handle,
        uuid=_string(nvml.nvmlDeviceGetUUID(handle)),
        name=_string(nvml.nvmlDeviceGetName(handle)),
        capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        memory=memory,
    )


def _is_divided(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE)
    except nvml.NVMLError:  # not all cards can be divided
        return False


def _string(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


# -- AMD, Intel and Apple ----------------------------------------------------------------------------------------------


def amd_device(name: str, architecture: str, memory: int, index: int = 0, arch_list: Sequence[str] = ()) -> Device:
    """The abilities of an AMD card, by torch's gcnArchName, ``"gfx942:sramecc+:xnack-"``. See `nvidia_device`."""
    base = architecture.split(":")[0]
    units = frozenset(dtype for names, dtypes in MATRIX_UNITS.items() if base.startswith(names) for dtype in dtypes)
    return Device(
        kind="cuda",
        index=index,
        name=name,
        memory=memory,
        architecture=base,
        tensor_cores=units,
        bf16="bf16" in units,
        fp16="fp16" in units,
        built_for=not arch_list or base in {arch.split(":")[0] for arch in arch_list},  # no other code runs
    )


def probe_amd(root: Path = ROOT) -> Probe | str:
    """The visible AMD cards, or why there is none; `root` is the folder with ``dev``."""
    version = torch.__version__
    if torch.version.hip is None and (root / "dev/kfd").exists():
        return f"AMD driver present, but torch {version} has no ROCm: install the ROCm build of torch"
    if torch.version.hip is None:
        return f"no AMD GPU: this torch {version} is built without ROCm"
    if not torch.cuda.is_available():
        return f"no AMD GPU: torch {version} is built for ROCm, but its runtime shows none"
    cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    arch_list = torch.cuda.get_arch_list()
    devices = tuple(amd_device(c.name, c.gcnArchName, c.total_memory, i, arch_list) for i, c in enumerate(cards))
    return Probe(devices, missing_code(devices, arch_list))


def probe_intel() -> Probe | str:
    """The visible Intel GPUs, or why there is none. Any torch built for XPU has, or compiles, code for them."""
    if not torch._C._has_xpu:
        return f"no Intel GPU: this torch {torch.__version__} is built without XPU"
    if not torch.xpu.is_available():
        return f"no Intel GPU: torch {torch.__version__} is built for XPU, but the driver shows none"
    return Probe(tuple(intel_device(torch.xpu.get_device_properties(i), i) for i in range(torch.xpu.device_count())))


def intel_device(card: Any, index: int) -> Device:
    """The abilities of an Intel GPU, from torch.xpu.get_device_properties."""
    # has_fp16 means twice the rate of fp32; subgroup matrix units are XMX and DPAS.
    matrix = "has_subgroup_matrix_multiply_accumulate"
    tf32 = getattr(card, f"{matrix}_tensor_float32", False)  # newer than torch 2.8
    types = {"bf16": card.has_bfloat16_conversions, "fp16": card.has_fp16, "tf32": tf32}
    return Device(
        kind="xpu",
        index=index,
        name=card.name,
        memory=card.total_memory,
        tensor_cores=frozenset(dtype for dtype, has in types.items() if has and getattr(card, matrix)),
        bf16=card.has_bfloat16_conversions,
        fp16=card.has_fp16,
    )


def probe_apple() -> Probe | str:
    """The GPU of Apple Silicon, with the most memory that Metal recommends to use, or why there is none."""
    if not torch.backends.mps.is_built():
        return f"no Apple GPU: this torch {torch.__version__} is built without MPS"
    if not torch.backends.mps.is_available():
        needs = "it needs Apple Silicon and macOS 14 or newer"
        return f"no Apple GPU: torch {torch.__version__} is built for MPS, but {needs}"
    chip = cpu.name() or "Apple"
    generation = re.search(r"\bM(\d+)", chip)
    # Before the M3 Metal emulates bf16 with fp32. fp16 has about fp32's rate.
    native = generation is not None and int(generation[1]) >= 3
    return Probe((Device("mps", 0, f"{chip} GPU", torch.mps.recommended_max_memory(), bf16=native),))


def detect(use_accelerators: bool = True) -> Hardware:
    """Look at this machine, as this process may use it, once for each value of ``CUDA_VISIBLE_DEVICES``.

    Args:
        use_accelerators: False looks at the processor only.

    Returns:
        The facts. Where an accelerator is missing, `Hardware.looked_for` gives the reason.

    Example:
        >>> detect(use_accelerators=False).devices
        ()
    """
    return _detect(bool(use_accelerators), env.read("CUDA_VISIBLE_DEVICES"))


@cache
def _detect(use_accelerators: bool, visible_devices: str | None) -> Hardware:
    processor = cpu.probe()
    if not use_accelerators:
        return Hardware(processor, looked_for=("no accelerator was looked for, as asked",))
    missing: list[str] = []
    probes = {"nvidia": probe_nvidia, "amd": probe_amd, "intel": probe_intel, "apple": probe_apple}
    for vendor, probe in probes.items():  # the first that finds something wins
        result = probe()
        if isinstance(result, Probe):
            return Hardware(processor, result.devices, vendor, (*missing, *result.missing))
        missing.append(result)
    return Hardware(processor, looked_for=tuple(missing))


# -- models of GPUs, by the data sheets of NVIDIA and of AMD's Instinct accelerators -----------------------------------

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
