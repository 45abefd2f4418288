"""`detect`, which probes each vendor's accelerators once a process, and the probes of NVIDIA, AMD, Intel and Apple.

NVIDIA's cards are read by NVML, with the optional package ``nvidia-ml-py``: CUDA stays uninitialised, and the process
may still fork. Without it, and for AMD and Intel, torch is asked, which initialises their runtime here.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..base import env
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
MATRIX_UNITS = (
    ("gfx908", {"fp16", "bf16"}),
    ("gfx90a", {"fp16", "bf16"}),
    ("gfx94", {"fp16", "bf16", "fp8"}),
    ("gfx950", {"fp16", "bf16", "fp8"}),
    ("gfx11", {"fp16", "bf16"}),
    ("gfx12", {"fp16", "bf16", "fp8"}),
)


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
    units = frozenset(dtype for prefix, dtypes in MATRIX_UNITS if base.startswith(prefix) for dtype in dtypes)
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
