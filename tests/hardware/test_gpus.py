"""Models of GPUs by name, and machines described in words."""

import pytest

from easymp import SettingError
from easymp.hardware.gpus import (
    FABRIC,
    GPUS,
    MEMORY,
    NETWORK,
    collective_seconds,
    copy_seconds,
    describe,
    find,
    peak_flops,
)

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
        assert find(name).name == model
    for name in OTHERS:
        assert find(name) is None and peak_flops(name, "bf16") is None


def test_peaks_are_of_dense_products():
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989.4e12
    assert peak_flops("Tesla V100-SXM2-16GB", "bf16") is None  # no units for it


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_peaks_agree_with_the_abilities_of_the_chip(gpu):
    device = gpu.device()
    assert find(device.name) is gpu
    assert device.bf16 == bool(gpu.bf16) and device.fp8 == bool(gpu.fp8) and device.tf32 == bool(gpu.tf32)
    rates = [rate for rate in (gpu.fp32, gpu.tf32, gpu.bf16, gpu.fp8) if rate]
    assert rates == sorted(rates)


def test_predicted_time_of_collectives():
    half, whole = (collective_seconds(kind, 10**9, 8, 1, "h100") for kind in ("all_gather", "all_reduce"))
    assert half == pytest.approx(10**9 * 7 / 8 / 360e9 + 30e-6)  # 80 % of 450 GB/s
    assert whole == pytest.approx(2 * (half - 30e-6) + 30e-6)
    far = collective_seconds("all_gather", 10**9, 16, 16, "h100")  # one GPU a node
    assert far == pytest.approx(10**9 * 15 / 16 / 40e9 + 40e-6)
    assert collective_seconds("send", 10**9, 2, 1, "T4") == pytest.approx(10**9 / 12.6e9 + 10e-6)
    assert collective_seconds("send", 1, 2, 1, "an unknown one") is None
    assert {*FABRIC, *NETWORK} <= {gpu.name for gpu in GPUS} == {*MEMORY}
    assert copy_seconds(3350 * 10**9, "H100") == pytest.approx(1 / 0.8) and copy_seconds(1, "cpu") is None
    named = {
        "A100": 1555,
        "NVIDIA A100-SXM4-40GB": 1555,
        "NVIDIA A100-SXM4-80GB": 2039,
        "NVIDIA A100 80GB PCIe": 1935,
    }
    named[describe("8xA100-80GB").hardware.devices[0].name] = 2039
    for name, rate in named.items():
        assert copy_seconds(rate * 10**9, name) == pytest.approx(1 / 0.8)


@pytest.mark.parametrize("name", ["8xH100", "T4", "A100", "MI300X"])
def test_a_description_has_the_abilities_of_the_machine(name):
    real, made = MACHINES[name].devices[0], describe(name).hardware.devices[0]
    assert (made.architecture, made.tensor_cores) == (real.architecture, real.tensor_cores)
    assert (made.bf16, made.fp16) == (real.bf16, real.fp16)


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
        found = describe(text)
        assert (found.nodes, found.processes) == (nodes, processes)
        assert [d.index for d in found.hardware.devices] == list(range(processes))
        assert {d.memory for d in found.hardware.devices} == {memory * 10**9}


def test_what_a_description_leaves_open_is_said():
    assert "40 or 80 GB; 40 are assumed, A100-80GB says otherwise" in describe("8xA100").unknown[0]
    alike = describe("64x80GB")
    assert "H100, H100 PCIe, H800, H800 PCIe, A100, A800" in alike.unknown[0]
    assert alike.hardware.devices[0].bf16 and not alike.hardware.devices[0].fp8
    assert "8 are assumed; 4x16x80GB says otherwise" in alike.unknown[-1]
    assert "instructions of the processor" in describe("4xcpu").unknown[0]


def test_what_is_not_a_machine():
    for text, words in {
        "8xH100-40GB": "H100 has 80GB, not 40GB",
        "0xH100": "describes no machine: write GPUs as in 8xH100",
        "3x30GB": "no GPU that easymp knows has 30GB. Known sizes: 10GB, 11GB",
        "8x": "describes no machine",
        "": "describes no machine",
    }.items():
        with pytest.raises(SettingError, match=words):
            describe(text)
