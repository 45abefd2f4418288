"""What is derived from a name and a number, against the recorded machines."""

from dataclasses import FrozenInstanceError

import pytest

from easymp.hardware import accelerators, nvidia
from easymp.hardware.nvidia import WITHOUT_TENSOR_CORES, build_for, built_for

from .machines import MACHINES

WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]  # torch 2.13+cu130
OF = {
    vendor: [name for name, machine in MACHINES.items() if machine.vendor == vendor]
    for vendor in ("nvidia", "amd")
}


@pytest.mark.parametrize("machine", OF["nvidia"])
def test_nvidia_cards_are_derived_as_recorded(machine):
    for card in MACHINES[machine].devices:
        assert nvidia.facts_for(card.name, card.capability, card.memory, card.index) == card


@pytest.mark.parametrize("machine", OF["amd"])
def test_amd_cards_are_derived_as_recorded(machine):
    for card in MACHINES[machine].devices:
        assert (
            accelerators.amd_facts(card.name, f"{card.architecture}:sramecc+:xnack-", card.memory, card.index)
            == card
        )


def test_the_intel_card_is_derived_as_recorded():
    card = MACHINES["Intel XPU"].devices[0]
    assert (
        accelerators.intel_facts(card.name, card.memory, bf16=True, fp16=True, matrix=True, tf32=True) == card
    )


def test_the_apple_gpu_is_derived_as_recorded():
    card = MACHINES["M-series Mac"].devices[0]
    assert accelerators.apple_facts("Apple M3 Max", card.memory) == card


@pytest.mark.parametrize(
    ("chip", "native"),
    [("Apple M1", False), ("Apple M2 Ultra", False), ("Apple M10", True), ("Apple", False)],
)
def test_metal_emulates_bf16_before_the_m3(chip, native):
    assert accelerators.apple_facts(chip, 1).bf16 is native


@pytest.mark.parametrize(
    ("name", "has"),
    [
        ("NVIDIA GeForce GTX 1650", False),
        ("NVIDIA GeForce GTX 1660 SUPER", False),
        ("GeForce GTX 1650 Ti with Max-Q Design", False),
        ("NVIDIA T1000 8GB", False),
        ("NVIDIA T400", False),
        ("Quadro T2000", False),
        ("NVIDIA GeForce MX450", False),
        ("Tesla T4", True),
        ("NVIDIA T4G", True),
        ("NVIDIA GeForce RTX 2080 Ti", True),
        ("Quadro RTX 6000", True),
        ("NVIDIA TITAN RTX", True),
    ],
)
def test_turing_with_and_without_tensor_cores(name, has):
    assert (WITHOUT_TENSOR_CORES.search(name) is None) is has
    assert nvidia.facts_for(name, (7, 5), 2**33).fp16 is has


@pytest.mark.parametrize(
    ("architecture", "cores"),
    [
        ("gfx906", set()),
        ("gfx908", {"fp16", "bf16"}),
        ("gfx90a", {"fp16", "bf16"}),
        ("gfx950", {"fp16", "bf16", "fp8", "mxfp8"}),
        ("gfx1030", set()),
        ("gfx1100", {"fp16", "bf16"}),
        ("gfx1201", {"fp16", "bf16", "fp8"}),
    ],
)
def test_amd_architectures(architecture, cores):
    assert accelerators.amd_facts("card", architecture, 1).tensor_cores == cores


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((8, 0), WHEEL, True),
        ((8, 9), WHEEL, True),  # sm_86's machine code
        ((12, 1), WHEEL, True),
        ((10, 3), WHEEL, True),
        ((6, 1), WHEEL, False),
        ((7, 0), WHEEL, False),  # same major version, but only a later minor one was compiled
        ((8, 7), WHEEL, False),  # a Jetson's is not the server chips'
        ((8, 7), ["sm_87"], True),
        ((8, 9), ["sm_87"], False),
        ((12, 0), ["sm_80", "sm_90"], False),
        ((12, 0), ["sm_90", "compute_90"], True),  # compiled at load
        ((8, 6), ["sm_90", "compute_90"], False),
        ((9, 0), ["sm_90a"], True),
        ((10, 0), ["sm_90", "compute_90a"], False),
        ((10, 3), ["sm_100a"], False),
        ((10, 3), ["sm_100f"], True),
        ((9, 0), [], True),
        ((9, 0), ["something_else"], True),
    ],
)
def test_which_compiled_code_runs_where(capability, built, runs):
    assert built_for(capability, built) is runs
    assert nvidia.facts_for("card", capability, 1, arch_list=built).built_for is runs


@pytest.mark.parametrize(
    ("capability", "words"),
    [((3, 5), "source"), ((6, 1), "cu126"), ((8, 7), "board"), ((8, 6), "newer"), ((12, 0), "cu130")],
)
def test_the_right_build_is_named(capability, words):
    assert words in build_for(capability)


def test_amd_code_runs_on_its_own_architecture_alone():
    assert accelerators.amd_facts("card", "gfx942:xnack-", 1, arch_list=["gfx90a", "gfx942"]).built_for
    assert not accelerators.amd_facts("card", "gfx950", 1, arch_list=["gfx90a", "gfx942"]).built_for


@pytest.mark.parametrize("machine", list(MACHINES.values()), ids=list(MACHINES))
def test_facts_are_frozen_hashable_and_of_one_kind(machine):
    assert hash(machine) == hash(machine)
    assert {device.kind for device in machine.devices} <= {machine.kind}
    assert [device.index for device in machine.devices] == list(range(len(machine.devices)))
    assert bool(machine.links) == (len(machine.devices) > 1)
    with pytest.raises(FrozenInstanceError):
        machine.vendor = "other"
