"""`detect`, which probes each vendor's accelerators once a process, and the probes of NVIDIA, AMD, Intel and Apple.

NVIDIA's cards are read by NVML, the driver's own management library, with the optional package ``nvidia-ml-py``: CUDA stays
uninitialised, and the process may still fork. Without it, and for AMD and Intel, torch is asked, which initialises their runtime here.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..base import env
from . import cpu
from .cpu import ROOT
from .facts import Device, Hardware

INSTALL = "pytorch.org/get-started/locally"

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

# Chips in boards (Jetson, Drive): desktop and server chips of the same major version do not run their machine code,
# as torch's own check has it (DEVICE_REQUIREMENT in torch/cuda/__init__.py).
INTEGRATED = {(5, 3), (6, 2), (7, 2), (8, 7), (10, 1)}

# Numbers of nvml.h, because pynvml's name for the first is by mistake a tuple.
P2P_READ, P2P_NVLINK, P2P_OK, MIG_ENABLED = 0, 2, 0, 1

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

# -- NVIDIA: the abilities of a card --------------------------------------------------------------------------------------


def facts_for(
    name: str, capability: tuple[int, int], memory: int, index: int = 0, arch_list: Sequence[str] = ()
) -> Device:
    """The abilities of a card with `memory` bytes; `arch_list` is torch.cuda.get_arch_list() (empty: unknown, taken as right)."""
    # bf16: units that compute in it, not the emulation that torch.cuda.is_bf16_supported() counts. fp16: Tensor Cores. Without them
    # autocast gains nothing (nor on capability 6.0, whose plain fp16 rate is double), and GTX 16 cards give NaN in convolutions.
    without = capability == (7, 5) and WITHOUT_TENSOR_CORES.search(name)
    cores = frozenset(
        kind for since, kinds in TENSOR_CORES if capability >= since and not without for kind in kinds
    )
    return Device(
        kind="cuda",
        index=index,
        name=name,
        memory=memory,
        capability=capability,
        architecture=f"sm_{capability[0]}{capability[1]}",
        tensor_cores=cores,
        bf16="bf16" in cores,
        fp16="fp16" in cores,
        built_for=built_for(capability, arch_list),
    )


def built_for(capability: tuple[int, int], arch_list: Iterable[str]) -> bool:
    """Whether code compiled for `arch_list`, as ``["sm_80", "sm_90a", "compute_120"]``, runs on `capability`."""
    names = [re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch) for arch in arch_list]
    codes = [(n[1], (int(n[2]), int(n[3])), n[4]) for n in names if n]

    # NVCC documentation, "GPU Compilation": machine code (sm_) runs on the same major version and the same or a later minor one, with the
    # suffix "a" on that one alone; PTX (compute_) is compiled at load for the same or any later capability.
    def runs(form: str, code: tuple[int, int], suffix: str) -> bool:
        if suffix == "a" or (form == "sm" and INTEGRATED & {capability, code}):
            return capability == code
        return code <= capability and (capability[0] == code[0] or (form == "compute" and not suffix))

    return not codes or any(runs(*code) for code in codes)


def build_for(capability: tuple[int, int]) -> str:
    """Words for the build of torch that has code for this card (PYTORCH_RELEASES_CODE_CC in torch/cuda/__init__.py)."""
    if capability in INTEGRATED:
        return "NVIDIA's own build of torch for this board"
    if capability < (5, 0):
        return "torch from source: no build of today has this architecture"
    if capability < (7, 5):
        return "torch built for CUDA 12.6 (cu126), the last with this architecture"
    return "torch built for CUDA 13.0 (cu130)" if capability >= (10, 0) else "a newer torch built for CUDA"


# -- NVIDIA: the cards here ---------------------------------------------------------------------------------------------


def probe_nvidia(root: Path = ROOT) -> Found | str:
    """The visible cards, or why there is none; `root` is the folder with ``proc``."""
    version, text = torch.__version__, env.read("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None:
        if (root / "proc/driver/nvidia/version").exists():
            build = f"install the CUDA build of torch ({INSTALL})"
            return f"NVIDIA driver present, but torch {version} has no CUDA: {build}"
        return f"no NVIDIA GPU: this torch {version} is built without CUDA"
    seen = read_nvml()
    if seen is None:
        return _by_torch(text)
    if not seen.cards:
        hidden = seen.total and text is not None
        here = f"CUDA_VISIBLE_DEVICES={text!r} shows none of the {seen.total} here"
        return f"no NVIDIA GPU: {here if hidden else 'the driver lists none'}"
    # Within one major version any driver runs any minor one (CUDA Compatibility, "Minor Version Compatibility").
    if seen.cuda[0] < int(torch.version.cuda.split(".")[0]):
        runs = f"NVIDIA driver {seen.driver} runs CUDA {seen.cuda[0]}.{seen.cuda[1]}"
        remedy = f"update the driver, or install torch built for CUDA {seen.cuda[0]} ({INSTALL})"
        return f"{runs}, but torch {version} needs CUDA {torch.version.cuda}: {remedy}"
    return _found([(card.name, card.capability, card.memory) for card in seen.cards], seen.links)


def _by_torch(text: str | None) -> Found | str:
    with warnings.catch_warnings(record=True) as said:  # torch says why there is no device in a warning
        warnings.simplefilter("always")
        there = torch.cuda.is_available()
    if not there:
        shown = f" (CUDA_VISIBLE_DEVICES={text!r})" if text is not None else ""
        why = str(said[0].message).split("(Triggered")[0].strip().rstrip(".") if said else ""
        return f"no NVIDIA GPU{shown}: {why or 'the driver shows none or is not there'}"
    cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return _found([(c.name, (c.major, c.minor), c.total_memory) for c in cards], links_by_torch(len(cards)))


def _found(facts: Sequence[tuple[str, tuple[int, int], int]], links: str) -> Found:
    # torch.cuda.get_arch_list() before 2.9 asks is_available() first, which wakes the driver; the flags do not.
    flags = getattr(torch._C, "_cuda_getArchFlags", None)
    built = (flags() or "").split() if flags else torch.cuda.get_arch_list()
    devices = tuple(facts_for(*fact, i, built) for i, fact in enumerate(facts))
    return Found(devices, links, no_code(devices, built, lambda d: build_for(d.capability)))


def no_code(devices: Sequence[Device], built: Sequence[str], build: Callable[[Any], str]) -> tuple[str, ...]:
    """A sentence for each kind of card that this torch has no code for."""
    strangers = {d.name: d for d in devices if not d.built_for}
    here = f"in this torch {torch.__version__}, built for {' '.join(built)}"
    return tuple(
        f"no code for {n} ({d.architecture}) {here}: install {build(d)}" for n, d in strangers.items()
    )


def links_by_torch(count: int) -> str:
    """``"P2P"`` where each card can read each other's memory, else ``"PCIe"``; ``""`` for one card."""
    if count < 2:
        return ""
    pairs = combinations(range(count), 2)
    return "P2P" if all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs) else "PCIe"


# -- NVML --------------------------------------------------------------------------------------------------------------


class Card(NamedTuple):
    """A card, or an instance of one that is divided (Multi-Instance GPU)."""

    handle: Any  # NVML's
    uuid: str  # "GPU-…" or "MIG-…"
    name: str
    capability: tuple[int, int]
    memory: int
    address: str | None = None  # on the PCI bus, "00000000:3B:00.0"
    divided: bool = False
    instances: tuple[Card, ...] = ()


class Found(NamedTuple):
    """The devices that a probe saw, in the words of `Hardware`; `missing` says of which this torch has no code."""

    devices: tuple[Device, ...]
    links: str = ""
    missing: tuple[str, ...] = ()


class Seen(NamedTuple):
    """The answers of NVML: the visible cards, and the machine's number of cards and driver."""

    cards: tuple[Card, ...]
    total: int
    cuda: tuple[int, int]  # newest CUDA that the driver can run
    driver: str
    links: str


def read_nvml() -> Seen | None:
    """The cards that CUDA will show; None if NVML cannot tell (no package, no driver, a Jetson, cards whose order is unknown)."""
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
        cards = tuple(_card(pynvml, handle) for handle in handles)
        # NVML counts in the order of the PCI bus, CUDA by default from the fastest card on: of unlike cards an index means the same to both
        # only under CUDA_DEVICE_ORDER=PCI_BUS_ID.
        by_uuid = (env.read("CUDA_VISIBLE_DEVICES") or "").startswith(("GPU-", "MIG-"))
        unlike = len({card.name for card in cards}) > 1
        if unlike and not by_uuid and env.read("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            return None
        left = visible(cards)
        version = pynvml.nvmlSystemGetCudaDriverVersion_v2()  # 12040 is 12.4
        driver = _string(pynvml.nvmlSystemGetDriverVersion())
        return Seen(left, len(cards), (version // 1000, version % 1000 // 10), driver, _links(pynvml, left))
    except (pynvml.NVMLError, AttributeError, TypeError):
        return None  # a card that does not answer; a pynvml too old for a call
    finally:
        pynvml.nvmlShutdown()


def visible(cards: tuple[Card, ...]) -> tuple[Card, ...]:
    """The cards that ``CUDA_VISIBLE_DEVICES`` leaves, in CUDA's order; `cards` are all of them, in the order that indices mean."""
    # The first entry that names nothing ends the list, and a repeated one empties it. A process sees a single MIG instance, and then no
    # whole card (MIG User Guide, "Device Enumeration").
    entries = torch.cuda._parse_visible_devices()
    everything = [*cards, *(instance for card in cards for instance in card.instances)]
    chosen: list[Card] = []
    for entry in entries:
        if isinstance(entry, int):
            matches = list(cards[entry : entry + 1])
        else:
            matches = [card for card in everything if card.uuid.startswith(entry.strip())]
        if len(matches) != 1:
            break
        if matches[0] in chosen:
            return ()
        chosen += matches
    seen = [c.instances[0] if c.divided else c for c in chosen if c.instances or not c.divided]
    instance = next((card for card in seen if card.uuid.startswith("MIG-")), None)
    return (instance,) if instance else tuple(seen)


def _card(nvml: Any, handle: Any) -> Card:
    capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
    info = _or_none(nvml, nvml.nvmlDeviceGetPciInfo, handle)
    card = _described(nvml, handle, capability, _string(info.busId) if info else None)
    mode = _or_none(nvml, nvml.nvmlDeviceGetMigMode, handle)  # not all cards can be divided
    if not mode or mode[0] != MIG_ENABLED:
        return card
    places = range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))
    handles = [_or_none(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, i) for i in places]
    found = [_described(nvml, each, capability, card.address) for each in handles if each is not None]
    return card._replace(divided=True, instances=tuple(found))


def _described(nvml: Any, handle: Any, capability: tuple[int, int], address: str | None) -> Card:
    uuid, name = _string(nvml.nvmlDeviceGetUUID(handle)), _string(nvml.nvmlDeviceGetName(handle))
    try:  # CUDA shows NVML's total without the driver's reserve, which only the second version tells apart
        info = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        memory = info.total - info.reserved
    except nvml.NVMLError:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle).total
    return Card(handle, uuid, name, capability, memory, address)


def _or_none(nvml: Any, ask: Any, *args: Any) -> Any:
    try:
        return ask(*args)
    except nvml.NVMLError:
        return None


def _links(nvml: Any, cards: tuple[Card, ...]) -> str:
    """The slowest link between any two cards, which limits collectives."""
    if len(cards) < 2:
        return ""
    pairs = [(a.handle, b.handle) for a, b in combinations(cards, 2)]
    for name, way in (("NVLink", P2P_NVLINK), ("PCIe P2P", P2P_READ)):
        if all(_or_none(nvml, nvml.nvmlDeviceGetP2PStatus, a, b, way) == P2P_OK for a, b in pairs):
            return name
    return "PCIe"


def _string(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


# -- AMD, Intel and Apple --------------------------------------------------------------------------------------------------


def amd_facts(
    name: str, architecture: str, memory: int, index: int = 0, arch_list: Sequence[str] = ()
) -> Device:
    """The abilities of an AMD card; `architecture` is torch's gcnArchName, ``"gfx942:sramecc+:xnack-"``; the rest as in `facts_for`."""
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
        built_for=not arch_list or base in {arch.split(":")[0] for arch in arch_list},  # no other code runs
    )


def probe_amd(root: Path = ROOT) -> Found | str:
    """The visible AMD cards, or why there is none; `root` is the folder with ``dev``."""
    version = torch.__version__
    if torch.version.hip is None and (root / "dev/kfd").exists():
        return f"AMD driver present, but torch {version} has no ROCm: install the ROCm build of torch"
    if torch.version.hip is None:
        return f"no AMD GPU: this torch {version} is built without ROCm"
    if not torch.cuda.is_available():
        return f"no AMD GPU: torch {version} is built for ROCm, but its runtime shows none"
    cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    built = torch.cuda.get_arch_list()
    devices = tuple(amd_facts(c.name, c.gcnArchName, c.total_memory, i, built) for i, c in enumerate(cards))
    missing = no_code(devices, built, lambda d: "a build of torch for a ROCm that supports this card")
    return Found(devices, links_by_torch(len(devices)), missing)


def probe_intel() -> Found | str:
    """The visible Intel GPUs, or why there is none."""
    if not torch._C._has_xpu:
        return f"no Intel GPU: this torch {torch.__version__} is built without XPU"
    if not torch.xpu.is_available():
        return f"no Intel GPU: torch {torch.__version__} is built for XPU, but the driver shows none"
    cards = [torch.xpu.get_device_properties(i) for i in range(torch.xpu.device_count())]
    return Found(tuple(intel_facts(card, i) for i, card in enumerate(cards)))


def intel_facts(card: Any, index: int) -> Device:
    """The abilities of an Intel GPU, from torch.xpu.get_device_properties. Any torch built for XPU has, or compiles, code for it."""
    # has_fp16 means twice the rate of fp32; subgroup matrix units are XMX and DPAS.
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


def probe_apple() -> Found | str:
    """The GPU of Apple Silicon, or why there is none. `memory` is the most that Metal recommends to use of the shared memory."""
    if not torch.backends.mps.is_built():
        return f"no Apple GPU: this torch {torch.__version__} is built without MPS"
    if not torch.backends.mps.is_available():
        needs = "it needs Apple Silicon and macOS 14 or newer"
        return f"no Apple GPU: torch {torch.__version__} is built for MPS, but {needs}"
    # bf16 runs on every chip, but Metal emulates it with fp32 before the M3. fp16 has about fp32's rate, so a gain has to be measured.
    chip = cpu.name() or "Apple"
    generation = re.search(r"\bM(\d+)", chip)
    native = generation is not None and int(generation[1]) >= 3
    return Found((Device("mps", 0, f"{chip} GPU", torch.mps.recommended_max_memory(), bf16=native),))


# The first that finds something wins.
PROBES: dict[str, Callable[[], Found | str]] = {"nvidia": probe_nvidia, "amd": probe_amd}
PROBES |= {"intel": probe_intel, "apple": probe_apple}


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
    for vendor, probe in PROBES.items():
        found = probe()
        if isinstance(found, Found):
            return Hardware(processor, found.devices, vendor, found.links, (*missing, *found.missing))
        missing.append(found)
    return Hardware(processor, looked_for=tuple(missing))


# -- the NUMA nodes of cards ----------------------------------------------------------------------------------------------


def gpu_nodes(root: Path = ROOT) -> list[int | None]:
    """The node of each visible accelerator, in torch's order; None where it is unknown, as for all but NVIDIA's with NVML."""
    count = max(torch.cuda.device_count(), torch.xpu.device_count())
    seen = read_nvml() if torch.cuda.device_count() and not torch.version.hip else None
    if seen is None or len(seen.cards) != count:
        return [None] * count
    return [near(card.address, root) for card in seen.cards]


def near(address: str | None, root: Path = ROOT) -> int | None:
    """The node of the device at a PCI address as NVML has it, ``"00000000:3B:00.0"``; None where the kernel says -1, or nothing."""
    if not address:
        return None
    domain, _, rest = address.lower().partition(":")
    return cpu.number(root / "sys/bus/pci/devices" / f"{int(domain, 16):04x}:{rest}" / "numa_node")
