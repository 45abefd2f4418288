"""NVIDIA cards.

`probe` asks NVML where ``nvidia-ml-py`` is installed (`nvml`), and CUDA stays uninitialised. Elsewhere it asks torch's lazy
calls: these load the driver and initialise CUDA in this process, though nothing is allocated, and a process forked
afterwards cannot use CUDA. Everything else here is arithmetic on a card's name and compute capability.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from ..base import env
from . import nvml
from .architectures import build_for, built_for, tensor_cores
from .facts import Device
from .found import Found
from .peers import by_torch

ROOT = Path("/")
INSTALL = "pytorch.org/get-started/locally"


def facts_for(
    name: str, capability: tuple[int, int], memory: int, index: int = 0, arch_list: Sequence[str] = ()
) -> Device:
    """What a card of this `capability` can do, with a torch built for `arch_list` (torch.cuda.get_arch_list(); empty:
    unknown, taken as right). `memory` in bytes.

    bf16 is True for units that compute in it, not for the emulation that torch.cuda.is_bf16_supported() counts by default.
    fp16 is True with Tensor Cores: without them autocast casts for no gain (also on compute capability 6.0, whose plain fp16
    rate is double), and the GTX 16 cards give NaN in convolutions.
    """
    cores = tensor_cores(name, capability)
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


def probe(root: Path = ROOT) -> Found:
    """The visible cards, or why there is none; `root` is where ``proc`` lies."""
    if torch.version.cuda is None:
        return _none(_without_cuda(root))
    text = env.read("CUDA_VISIBLE_DEVICES")
    seen = nvml.read(text, env.read("CUDA_DEVICE_ORDER"))
    return _by_torch(text) if seen is None else _by_nvml(seen, text)


def _without_cuda(root: Path) -> str:
    if (root / "proc/driver/nvidia/version").exists():
        return f"NVIDIA driver present, but torch {torch.__version__} has no CUDA: install the CUDA build of torch ({INSTALL})"
    return f"no NVIDIA GPU: this torch {torch.__version__} is built without CUDA"


def _by_nvml(seen: nvml.Seen, text: str | None) -> Found:
    if not seen.cards:
        hidden = f"CUDA_VISIBLE_DEVICES={text!r} shows none of the {seen.total} here"
        return _none(
            f"no NVIDIA GPU: {hidden}"
            if seen.total and text is not None
            else "no NVIDIA GPU: the driver lists none"
        )
    # Within one major version any driver runs any minor one (CUDA Compatibility, "Minor Version Compatibility").
    if seen.cuda[0] < int(torch.version.cuda.split(".")[0]):
        return _none(
            f"NVIDIA driver {seen.driver} runs CUDA {seen.cuda[0]}.{seen.cuda[1]}, but torch {torch.__version__} needs CUDA "
            f"{torch.version.cuda}: update the driver, or install torch built for CUDA {seen.cuda[0]} ({INSTALL})"
        )
    facts = [(card.name, card.capability, card.memory) for card in seen.cards]
    return _found(facts, seen.links)


def _by_torch(text: str | None) -> Found:
    with warnings.catch_warnings(record=True) as said:  # torch says why there is no device in a warning
        warnings.simplefilter("always")
        there = torch.cuda.is_available()
    if not there:
        shown = f" (CUDA_VISIBLE_DEVICES={text!r})" if text is not None else ""
        why = (
            str(said[0].message).split("(Triggered")[0].strip().rstrip(".")
            if said
            else "the driver shows none or is not there"
        )
        return _none(f"no NVIDIA GPU{shown}: {why}")
    cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return _found(
        [(card.name, (card.major, card.minor), card.total_memory) for card in cards], by_torch(len(cards))
    )


def _found(facts: Sequence[tuple[str, tuple[int, int], int]], links: str) -> Found:
    built = _arch_list()
    devices = tuple(facts_for(*fact, i, built) for i, fact in enumerate(facts))
    strangers = sorted({(d.capability, d.architecture, d.name) for d in devices if not d.built_for})
    missing = tuple(
        f"no code for {name} ({arch}) in this torch {torch.__version__}, built for {' '.join(built)}: "
        f"install {build_for(capability)}"
        for capability, arch, name in strangers
    )
    return Found("nvidia", devices, links, missing)


def _arch_list() -> list[str]:
    # torch.cuda.get_arch_list() before 2.9 asks is_available() first, which wakes the driver; the flags do not.
    flags = getattr(torch._C, "_cuda_getArchFlags", None)
    return (flags() or "").split() if flags else torch.cuda.get_arch_list()


def _none(why: str) -> Found:
    return Found("nvidia", missing=(why,))
