"""Stand-ins for the NVIDIA driver: the part of pynvml and of torch.cuda that the probes call."""

import sys
import types
from dataclasses import dataclass

import torch

WHEEL = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"  # torch 2.13+cu130


@dataclass
class FakeCard:
    name: str = "NVIDIA A100-SXM4-80GB"
    capability: tuple[int, int] = (8, 0)
    memory: int = 80 * 2**30
    reserved: int = 0
    uuid: str = "GPU-0000"
    mig: bool | None = None  # whether it is divided (Multi-Instance GPU); None: it cannot be


class NVMLError(Exception):
    pass


def pynvml(cards, cuda=13000, fails=()):
    """A module like pynvml, over `cards`. Calls in `fails` raise."""
    fake = types.ModuleType("pynvml")
    fake.NVMLError, fake.nvmlMemory_v2, fake.open = NVMLError, 0x02000028, 0
    fake.NVML_DEVICE_MIG_ENABLE = 1

    def refuse(*_):
        raise NVMLError("Not Supported")

    def count(step):
        fake.open += step

    def memory(card, version=None):
        reserved = {"reserved": card.reserved} if version else {}
        return types.SimpleNamespace(total=card.memory, **reserved)

    calls = {
        "nvmlInit": lambda: count(1),
        "nvmlShutdown": lambda: count(-1),
        "nvmlSystemGetCudaDriverVersion_v2": lambda: cuda,
        "nvmlSystemGetDriverVersion": lambda: "580.65.06",
        "nvmlDeviceGetCount": lambda: len(cards),
        "nvmlDeviceGetHandleByIndex": lambda i: cards[i],
        "nvmlDeviceGetName": lambda card: card.name.encode(),  # as older versions answer
        "nvmlDeviceGetUUID": lambda card: card.uuid,
        "nvmlDeviceGetCudaComputeCapability": lambda card: list(card.capability),
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetMigMode": lambda card: refuse() if card.mig is None else [int(card.mig)] * 2,
    }
    for name, call in calls.items():
        setattr(fake, name, refuse if name in fails else call)
    return fake


def install(monkeypatch, fake, cuda="13.0", arch=WHEEL):
    """Put `fake` (None: not installed) in pynvml's place, under a torch built for `cuda`, whose own calls fail."""
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: arch, raising=False)
    for name in ("is_available", "device_count", "get_device_properties", "init"):
        monkeypatch.setattr(torch.cuda, name, forbidden(name))


def forbidden(name):
    def call(*_, **__):
        raise AssertionError(f"torch.cuda.{name} was called: it initialises CUDA")

    return call


def properties(cards):
    """What torch.cuda.get_device_properties returns, for `cards`."""
    return lambda i: types.SimpleNamespace(
        name=cards[i].name, major=cards[i].capability[0], minor=cards[i].capability[1], total_memory=cards[i].memory
    )
