"""NVIDIA cards by NVML, the driver's own management library: CUDA stays uninitialised, so the process may still fork.

Through the optional package ``nvidia-ml-py`` (module ``pynvml``), imported at first use. Where it is missing or NVML does
not answer (no driver, a Jetson or other board without it), `read` returns None, which means "ask torch".
"""

from __future__ import annotations

from itertools import combinations
from typing import Any, NamedTuple

from .visible import Card, by_uuid, visible

# Numbers of nvml.h, because pynvml's name for the first is by mistake a tuple.
P2P_READ = 0
P2P_NVLINK = 2
P2P_OK = 0
MIG_ENABLED = 1


class Seen(NamedTuple):
    """What NVML says."""

    cards: tuple[Card, ...]  # visible ones
    total: int  # cards in the machine
    cuda: tuple[int, int]  # newest CUDA that the driver can run
    driver: str
    links: str


def read(text: str | None, order: str | None) -> Seen | None:
    """The cards that CUDA will show, or None where NVML cannot tell.

    `text` and `order` are ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER``. NVML counts in the order of the PCI bus, CUDA by
    default from the fastest card on, by a rule of its own: on a machine with cards of different models an index means the
    same to both only under ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, and otherwise the answer is None.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        cards = tuple(
            _card(pynvml, pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())
        )
        if len({card.name for card in cards}) > 1 and not by_uuid(text) and order != "PCI_BUS_ID":
            return None
        left = visible(text, cards)
        version = pynvml.nvmlSystemGetCudaDriverVersion_v2()  # 12040 is 12.4
        return Seen(
            cards=left,
            total=len(cards),
            cuda=(version // 1000, version % 1000 // 10),
            driver=_string(pynvml.nvmlSystemGetDriverVersion()),
            links=_links(pynvml, left),
        )
    except (pynvml.NVMLError, AttributeError):  # a card that answers to nothing; a pynvml too old for a call
        return None
    finally:
        pynvml.nvmlShutdown()


def addresses(uuids: list[str]) -> list[str | None]:
    """The PCI address of each card, ``"00000000:3B:00.0"``; of the whole card, for an instance of one. None where NVML does not say."""
    import pynvml

    def address(uuid: str) -> str | None:
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            if uuid.startswith("MIG-"):
                handle = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            return _string(pynvml.nvmlDeviceGetPciInfo(handle).busId)
        except (pynvml.NVMLError, AttributeError):
            return None

    pynvml.nvmlInit()
    try:
        return [address(uuid) for uuid in uuids]
    finally:
        pynvml.nvmlShutdown()


def _card(nvml: Any, handle: Any) -> Card:
    capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
    divided, instances = _instances(nvml, handle, capability)
    return _described(nvml, handle, capability, divided, instances)


def _described(nvml: Any, handle: Any, capability: tuple[int, int], divided=False, instances=()) -> Card:
    uuid, name = _string(nvml.nvmlDeviceGetUUID(handle)), _string(nvml.nvmlDeviceGetName(handle))
    return Card(handle, uuid, name, capability, _memory(nvml, handle), divided, instances)


def _memory(nvml: Any, handle: Any) -> int:
    """Bytes that CUDA shows: NVML's total without what the driver reserves, which only the second version tells apart."""
    try:
        info = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        return info.total - info.reserved
    except (nvml.NVMLError, AttributeError, TypeError):
        return nvml.nvmlDeviceGetMemoryInfo(handle).total


def _instances(nvml: Any, handle: Any, capability: tuple[int, int]) -> tuple[bool, tuple[Card, ...]]:
    """Whether the card is divided, and into what. The capability is asked of the whole card only."""
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0] != MIG_ENABLED:
            return False, ()
    except nvml.NVMLError:  # cards that cannot be divided
        return False, ()
    found = []
    for i in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            found.append(_described(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i), capability))
        except nvml.NVMLError:  # an empty place
            continue
    return True, tuple(found)


def _links(nvml: Any, cards: tuple[Card, ...]) -> str:
    """The weakest way between any two cards: a collective is as fast as its slowest pair."""
    if len(cards) < 2:
        return ""
    pairs = [(a.handle, b.handle) for a, b in combinations(cards, 2)]
    for name, what in (("NVLink", P2P_NVLINK), ("PCIe P2P", P2P_READ)):
        try:
            if all(nvml.nvmlDeviceGetP2PStatus(a, b, what) == P2P_OK for a, b in pairs):
                return name
        except nvml.NVMLError:
            continue
    return "PCIe"


def _string(value: str | bytes) -> str:
    """pynvml before version 11.5 returns bytes."""
    return value.decode() if isinstance(value, bytes) else value
