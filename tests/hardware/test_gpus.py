"""Models of GPUs by name, and machines described in words."""

import pytest

from easymp import SettingError
from easymp.hardware.accelerators import GPUS, describe, find_model

from .machines import MACHINES

MODELS = """
NVIDIA H100 80GB HBM3 = H100
NVIDIA H100 PCIe = H100 PCIe
NVIDIA A100-SXM4-80GB = A100
NVIDIA A10G = A10G
NVIDIA L40S = L40S
NVIDIA GH200 480GB = GH200
rtx-4090 = RTX 4090
NVIDIA GeForce RTX 3090 Ti = RTX 3090 Ti
NVIDIA RTX 6000 Ada Generation = RTX 6000 Ada
NVIDIA RTX PRO 6000 Blackwell Workstation Edition = RTX PRO 6000 Blackwell
Tesla V100-PCIE-32GB = V100 PCIe
AMD Instinct MI250X = MI250X
"""
OTHERS = ["NVIDIA T400", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "Some GPU", ""]
OTHERS += [f"NVIDIA GeForce RTX {name}" for name in ("4090 Laptop GPU", "4090 D", "3080 Ti")]


def test_the_drivers_name_finds_the_model():
    for line in MODELS.strip().splitlines():
        name, model = line.split(" = ")
        assert find_model(name).name == model
    for name in OTHERS:
        assert find_model(name) is None


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_the_name_of_a_described_card_finds_its_model(gpu):
    assert find_model(gpu.device().name) is gpu


@pytest.mark.parametrize("name", ["8xH100", "T4", "A100", "MI300X"])
def test_a_description_has_the_abilities_of_the_machine(name):
    real, described = MACHINES[name].devices[0], describe(name).hardware.devices[0]
    assert (described.architecture, described.tensor_cores) == (real.architecture, real.tensor_cores)
    assert (described.bf16, described.fp16) == (real.bf16, real.fp16)


MACHINES_IN_WORDS = {  # nodes, processes, GB
    "8xH100": (1, 8, 80),
    "2x8xA100-80GB": (2, 8, 80),
    "12xV100-32GB": (1, 12, 32),
    "16 x H100": (2, 8, 80),
    "RTX 4090": (1, 1, 24),
    "3x24GB": (1, 3, 24),
}


def test_nodes_processes_and_memory():
    for text, (nodes, processes, memory) in MACHINES_IN_WORDS.items():
        described = describe(text)
        assert (described.nodes, described.processes) == (nodes, processes)
        assert [d.index for d in described.hardware.devices] == list(range(processes))
        assert {d.memory for d in described.hardware.devices} == {memory * 10**9}


def test_what_a_description_leaves_open_is_said():
    assert "40 or 80 GB; 40 are assumed, A100-80GB says otherwise" in describe("8xA100").unknown[0]
    by_size = describe("64x80GB")
    assert "H100, H100 PCIe, H800, H800 PCIe, A100, A800" in by_size.unknown[0]
    assert by_size.hardware.devices[0].bf16 and not by_size.hardware.devices[0].fp8
    assert "8 are assumed; 4x16x80GB says otherwise" in by_size.unknown[-1]
    assert "instructions of the processor" in describe("4xcpu").unknown[0]


def test_what_is_not_a_machine():
    for text, message in {
        "8xH100-40GB": "H100 has 80GB, not 40GB",
        "0xH100": "describes no machine: write GPUs as in 8xH100",
        "3x30GB": "no GPU that easymp knows has 30GB. Known sizes: 10GB, 11GB",
        "8x": "describes no machine",
        "": "describes no machine",
    }.items():
        with pytest.raises(SettingError, match=message):
            describe(text)
