"""Stand-ins for the NVIDIA driver: the part of pynvml and of torch.cuda that the probes call."""

import sys
import types
from dataclasses import dataclass, field

import torch

WHEEL = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"


@dataclass
class FakeCard:
    name: str = "NVIDIA A100-SXM4-80GB"
    capability: tuple[int, int] = (8, 0)
    memory: int = 80 * 2**30
    reserved: int = 0
    uuid: str = "GPU-0000"
    mig: bool | None = None  # None: cannot be divided
    instances: list["FakeCard"] = field(default_factory=list)


class NVMLError(Exception):
    pass


def pynvml(cards, cuda=13000, p2p=None, fails=()):
    """A module like pynvml, over `cards`. `p2p(a, b, what)` answers with a status; calls named in `fails` raise."""
    fake = types.ModuleType("pynvml")
    fake.NVMLError, fake.nvmlMemory_v2 = NVMLError, 0x02000028
    fake.open = 0

    def offer(function):
        def call(*args, **kwargs):
            if function.__name__ in fails:
                raise NVMLError(function.__name__)
            return function(*args, **kwargs)

        setattr(fake, function.__name__, call)

    def refuse(why="Not Supported"):
        raise NVMLError(why)

    @offer
    def nvmlInit():
        fake.open += 1

    @offer
    def nvmlShutdown():
        fake.open -= 1

    @offer
    def nvmlSystemGetCudaDriverVersion_v2():
        return cuda

    @offer
    def nvmlSystemGetDriverVersion():
        return "580.65.06"

    @offer
    def nvmlDeviceGetCount():
        return len(cards)

    @offer
    def nvmlDeviceGetHandleByIndex(i):
        return cards[i]

    @offer
    def nvmlDeviceGetName(card):
        return card.name.encode()  # as older versions answer

    @offer
    def nvmlDeviceGetUUID(card):
        return card.uuid

    @offer
    def nvmlDeviceGetCudaComputeCapability(card):
        return refuse() if card.uuid.startswith("MIG-") else list(card.capability)

    @offer
    def nvmlDeviceGetMemoryInfo(card, version=None):
        if version is not None and card.reserved is None:
            refuse("Function Not Found")
        return (
            types.SimpleNamespace(total=card.memory, reserved=card.reserved)
            if version
            else types.SimpleNamespace(total=card.memory)
        )

    @offer
    def nvmlDeviceGetMigMode(card):
        return refuse() if card.mig is None else [int(card.mig), int(card.mig)]

    @offer
    def nvmlDeviceGetPciInfo(card):
        return types.SimpleNamespace(busId="00000000:3B:00.0")

    @offer
    def nvmlDeviceGetMaxMigDeviceCount(card):
        return 7

    @offer
    def nvmlDeviceGetMigDeviceHandleByIndex(card, i):
        return card.instances[i] if i < len(card.instances) else refuse("Not Found")

    @offer
    def nvmlDeviceGetP2PStatus(a, b, what):
        return p2p(a, b, what) if p2p else 0

    return fake


def install(monkeypatch, fake, cuda="13.0", arch=WHEEL):
    """Puts `fake` in pynvml's place (None: not installed), under a torch built for `cuda`, whose own calls may not be made."""
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: arch, raising=False)
    for name in ("is_available", "device_count", "get_device_properties", "can_device_access_peer", "init"):
        monkeypatch.setattr(torch.cuda, name, forbidden(name))


def forbidden(name):
    def call(*_, **__):
        raise AssertionError(f"torch.cuda.{name} was called: it initialises CUDA")

    return call


def properties(cards):
    """What torch.cuda.get_device_properties returns, for `cards`."""
    return lambda i: types.SimpleNamespace(
        name=cards[i].name,
        major=cards[i].capability[0],
        minor=cards[i].capability[1],
        total_memory=cards[i].memory,
    )
