"""Detection over stand-ins for the drivers: NVIDIA's by NVML and by torch, AMD's, Intel's and Apple's."""

from __future__ import annotations

import os
import subprocess
import sys
import types
import warnings
from dataclasses import replace

import pytest
import torch

from easymp import detect

from .fakes import WHEEL, FakeCard, install, properties, pynvml
from .machines import MACHINES

GIB = 2**30
PAIR = [FakeCard("a", uuid="GPU-aaaa"), FakeCard("b", uuid="GPU-bbbb")]
OF = {v: [n for n, machine in MACHINES.items() if machine.vendor == v] for v in ("nvidia", "amd")}


def missing() -> str:
    """Why there is no NVIDIA GPU."""
    machine = detect()
    assert not machine.devices
    return machine.looked_for[0]


# -- facts derived from a name and a number, against the recorded machines ---------------------------------------------


@pytest.mark.parametrize("machine", OF["nvidia"])
def test_nvidia_cards_are_derived_as_recorded(machine, monkeypatch):
    recorded = MACHINES[machine].devices
    cards = [FakeCard(d.name, d.capability, d.memory + GIB, GIB, f"GPU-{d.index}") for d in recorded]
    fake = pynvml(cards)
    install(monkeypatch, fake, arch="")
    assert detect().devices == recorded
    assert fake.open == 0 and not torch.cuda.is_initialized()  # NVML is shut down again, and torch is not asked


WITHOUT = (
    "NVIDIA GeForce GTX 1650,GeForce GTX 1650 Ti with Max-Q Design,NVIDIA T1000 8GB,Quadro T2000,NVIDIA GeForce MX450"
)
WITH = "Tesla T4,NVIDIA T4G,NVIDIA GeForce RTX 2080 Ti,Quadro RTX 6000"


def test_turing_with_and_without_tensor_cores(monkeypatch):
    names = [*WITHOUT.split(","), *WITH.split(",")]
    install(monkeypatch, pynvml([FakeCard(name, (7, 5), uuid=f"GPU-{name}") for name in names]))
    by_torch(monkeypatch, [FakeCard(name, (7, 5)) for name in names])
    assert {device.name: device.fp16 for device in detect().devices} == {
        **dict.fromkeys(WITHOUT.split(","), False),
        **dict.fromkeys(WITH.split(","), True),
    }


@pytest.mark.parametrize(
    ("capability", "built", "build"),  # what to install; "" where the code runs
    [
        *(((major, minor), WHEEL, "") for major, minor in ((8, 0), (8, 9), (12, 1), (10, 3))),
        ((6, 1), WHEEL, "cu126"),
        ((7, 0), WHEEL, "cu126"),  # same major version, but only a later minor one was compiled
        ((3, 5), WHEEL, "source"),
        ((8, 7), WHEEL, "board"),  # a Jetson's code is not the server chips'
        ((8, 7), "sm_87", ""),
        ((8, 9), "sm_87", "newer"),
        ((12, 0), "sm_80 sm_90", "cu130"),
        ((12, 0), "sm_90 compute_90", ""),  # compiled at load
        ((8, 6), "sm_90 compute_90", "newer"),
        ((9, 0), "sm_90a", ""),
        ((10, 0), "sm_90 compute_90a", "cu130"),
        ((10, 3), "sm_100a", "cu130"),
        ((10, 3), "sm_100f", ""),
        ((9, 0), "something_else", ""),
    ],
)
def test_which_compiled_code_runs_where(capability, built, build, monkeypatch):
    install(monkeypatch, pynvml([FakeCard("card", capability)]), arch=built)
    machine = detect()
    assert machine.devices[0].built_for is (not build)
    assert len(machine.looked_for) == bool(build) and build in "".join(machine.looked_for)


# -- NVIDIA by NVML ----------------------------------------------------------------------------------------------------


def test_a_driver_too_old_for_this_torch(monkeypatch):
    install(monkeypatch, pynvml([FakeCard()], cuda=12040))
    assert "runs CUDA 12.4" in missing() and "install torch built for CUDA 12" in missing()


WHOLE = [FakeCard(f"card {i}", uuid=f"GPU-{x * 4}-{i}") for i, x in enumerate("abc")]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("0,1,2", "card 0, card 1, card 2"),
        ("2,0", "card 2, card 0"),
        (" 1 , 2 ", "card 1, card 2"),
        *((text, "") for text in ("", "-1", "NoDevFiles", "1,1", "GPU-", "GPU-zzzz")),
        ("0,-1,2", "card 0"),
        ("0,7,1", "card 0"),
        ("1gpu,2ampere", "card 1, card 2"),
        ("GPU-cccc,GPU-aaaa", "card 2, card 0"),
        ("GPU-bbbb,GPU-bbbb-1", ""),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(monkeypatch, text, names):
    install(monkeypatch, pynvml(WHOLE))
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    machine = detect()
    assert ", ".join(device.name for device in machine.devices) == names
    assert [device.index for device in machine.devices] == list(range(len(machine.devices)))
    assert names or f"CUDA_VISIBLE_DEVICES={text!r} shows none of the 3 here" in machine.looked_for[0]


def test_asked_again_where_other_devices_are_visible(monkeypatch):
    install(monkeypatch, pynvml([FakeCard(uuid="GPU-a"), FakeCard(uuid="GPU-b")]))
    assert len(detect().devices) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert len(detect().devices) == 1


# -- NVIDIA by torch ---------------------------------------------------------------------------------------------------


def by_torch(monkeypatch, cards):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cards))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties(cards))


@pytest.mark.parametrize("fails", [None, "nvmlInit", "nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo"])
def test_torch_is_asked_where_nvml_is_silent(monkeypatch, fails):
    fake = None if fails is None else pynvml([FakeCard(), FakeCard()], fails={fails})
    install(monkeypatch, fake)
    by_torch(monkeypatch, PAIR)
    assert [device.architecture for device in detect().devices] == ["sm_80", "sm_80"]
    assert fake is None or fake.open == 0


DIVIDED = [FakeCard(mig=False, uuid="GPU-1"), FakeCard(mig=True, uuid="GPU-2")]


@pytest.mark.parametrize(
    ("cards", "visible_devices"),
    [
        (PAIR, "0,1"),  # of unlike cards only CUDA knows the order
        (DIVIDED, "0,1"),  # and which instances of a divided card (Multi-Instance GPU) a process sees
        (DIVIDED, "MIG-1234"),
    ],
)
def test_torch_is_asked_which_cards_are_visible(monkeypatch, cards, visible_devices):
    install(monkeypatch, pynvml(cards))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible_devices)
    by_torch(monkeypatch, PAIR[::-1])
    assert [device.name for device in detect().devices] == ["b", "a"]


def test_torchs_own_reason_is_quoted(monkeypatch):
    install(monkeypatch, None)
    reason = "CUDA initialization: Found no NVIDIA driver on your system"
    warning = f"{reason}. (Triggered internally at x.cpp:1.)"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: warnings.warn(warning, stacklevel=1))
    assert missing() == f"no NVIDIA GPU: {reason}"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert "(CUDA_VISIBLE_DEVICES='3')" in missing()


# -- the others --------------------------------------------------------------------------------------------------------


def rocm(monkeypatch, architecture, built=()):
    """A torch for ROCm on a machine with one card."""
    recorded = MACHINES["MI300X"].devices[0]
    card = types.SimpleNamespace(name=recorded.name, gcnArchName=architecture, total_memory=recorded.memory)
    for module, name, value in (
        (torch.version, "cuda", None),
        (torch.version, "hip", "7.0"),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "get_device_properties", lambda i: card),
        (torch.cuda, "get_arch_list", lambda: list(built)),
    ):
        monkeypatch.setattr(module, name, value)


def test_an_amd_card_is_derived_as_recorded(monkeypatch):
    rocm(monkeypatch, "gfx942:sramecc+:xnack-", ["gfx90a", "gfx942"])
    machine = detect()
    assert (machine.vendor, machine.devices) == ("amd", MACHINES["MI300X"].devices)
    assert "built without CUDA" in machine.looked_for[0]  # the misses before it


AMD = {
    "gfx906": set(),
    "gfx90a": {"fp16", "bf16"},
    "gfx950": {"fp16", "bf16", "fp8"},
    "gfx1030": set(),
    "gfx1100": {"fp16", "bf16"},
    "gfx1201": {"fp16", "bf16", "fp8"},
}


@pytest.mark.parametrize("architecture", AMD)
def test_amd_architectures(architecture, monkeypatch):
    rocm(monkeypatch, architecture, ["gfx000"])
    machine = detect()
    assert machine.devices[0].tensor_cores == AMD[architecture]
    assert not machine.devices[0].built_for and architecture in machine.looked_for[1]


def test_an_intel_card_is_derived_as_recorded(monkeypatch):
    recorded = MACHINES["Intel XPU"].devices[0]
    units = "has_subgroup_matrix_multiply_accumulate"
    abilities = ("has_fp16", "has_bfloat16_conversions", units, f"{units}_tensor_float32")
    card = types.SimpleNamespace(name=recorded.name, total_memory=recorded.memory, **dict.fromkeys(abilities, True))
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch._C, "_has_xpu", True)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda i: card)
    assert (detect().vendor, detect().devices) == ("intel", (recorded,))


@pytest.mark.parametrize(("chip", "native"), [("Apple M3 Max", True), ("Apple M2 Ultra", False), ("Apple M10", True)])
def test_metal_emulates_bf16_before_the_m3(chip, native, monkeypatch):
    recorded = MACHINES["M-series Mac"].devices[0]
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: recorded.memory)
    monkeypatch.setattr("easymp.hardware.cpu.name", lambda root=None: chip)
    assert detect().devices == (replace(recorded, name=f"{chip} GPU", bf16=native),)


def test_without_accelerators_none_is_looked_for(monkeypatch):
    install(monkeypatch, pynvml(PAIR))
    machine = detect(use_accelerators=False)
    assert (machine.kind, machine.vendor, machine.devices) == ("cpu", "none", ())
    assert machine.looked_for == ("no accelerator was looked for, as asked",)


# -- this machine ------------------------------------------------------------------------------------------------------


FORK = """
import os, torch
from easymp import detect
here = detect()
assert bool(here.devices) == {gpu} and not torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork()
pid = os.fork()
if pid == 0:
    if {gpu}:
        torch.ones(1, device="cuda")
    os._exit(0 if detect() == here else 3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs hardware whose system forks, such as Linux")
@pytest.mark.skipif(
    torch.version.cuda is not None or torch.version.hip is not None,
    reason="needs hardware without a GPU: torch built for one may have to ask it",
)
def test_nothing_is_initialised_and_a_fork_can_detect():
    subprocess.run([sys.executable, "-c", FORK.format(gpu=False)], check=True, timeout=100)


@pytest.mark.gpu
def test_as_cuda_says():
    machine = detect()
    assert len(machine.devices) == torch.cuda.device_count()
    for device in machine.devices:
        card = torch.cuda.get_device_properties(device.index)
        assert (device.name, device.capability) == (card.name, (card.major, card.minor))
        assert abs(device.memory - card.total_memory) < 2**28  # NVML counts in other pages
        assert device.bf16 == (card.major >= 8) and device.built_for
        torch.ones(1, device=f"cuda:{device.index}").add_(1)  # there is code for it


@pytest.mark.gpu
def test_nvml_leaves_cuda_asleep():
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py; without it torch is asked, which initialises CUDA")
    subprocess.run([sys.executable, "-c", FORK.format(gpu=True)], check=True, timeout=100)
