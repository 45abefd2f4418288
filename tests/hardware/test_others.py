"""The probes of AMD, Intel and Apple over stand-ins for torch's calls."""

import types

import pytest
import torch

from easymp.hardware import mps, rocm, xpu

from .machines import MACHINES


@pytest.fixture
def rocm_torch(monkeypatch):
    recorded = MACHINES["MI300X"].devices[0]
    card = types.SimpleNamespace(
        name=recorded.name, gcnArchName="gfx942:sramecc+:xnack-", total_memory=recorded.memory
    )
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: card)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["gfx90a", "gfx942"])
    return recorded


def test_amd(rocm_torch):
    assert rocm.probe() == ("amd", (rocm_torch,), "", ())


def test_amd_cards_and_their_links(rocm_torch, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    found = rocm.probe()
    assert ([device.index for device in found.devices], found.links) == ([0, 1], "P2P")


def test_amd_card_without_code(rocm_torch, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["gfx1100"])
    found = rocm.probe()
    assert not found.devices[0].built_for and "gfx942" in found.missing[0]


def test_rocm_without_a_card(rocm_torch, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "its runtime shows none" in rocm.probe().missing[0]


def test_a_torch_without_rocm_beside_a_driver(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "hip", None)
    assert "built without ROCm" in rocm.probe(tmp_path).missing[0]
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    assert "install the ROCm build of torch" in rocm.probe(tmp_path).missing[0]


@pytest.fixture
def xpu_torch(monkeypatch):
    recorded = MACHINES["Intel XPU"].devices[0]
    card = types.SimpleNamespace(
        name=recorded.name,
        total_memory=recorded.memory,
        has_fp16=True,
        has_bfloat16_conversions=True,
        has_subgroup_matrix_multiply_accumulate=True,
        has_subgroup_matrix_multiply_accumulate_tensor_float32=True,
    )
    monkeypatch.setattr(torch._C, "_has_xpu", True)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda i: card)
    return recorded, card


def test_intel(xpu_torch):
    assert xpu.probe() == ("intel", (xpu_torch[0],), "", ())


def test_intel_under_a_torch_that_does_not_tell_of_tf32(xpu_torch):
    del xpu_torch[1].has_subgroup_matrix_multiply_accumulate_tensor_float32
    assert xpu.probe().devices[0].tensor_cores == {"fp16", "bf16"}


def test_xpu_without_a_card(xpu_torch, monkeypatch):
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    assert "the driver shows none" in xpu.probe().missing[0]


def test_apple(monkeypatch):
    recorded = MACHINES["M-series Mac"].devices[0]
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: recorded.memory)
    monkeypatch.setattr(mps, "processor", lambda: "Apple M3 Max")
    assert mps.probe() == ("apple", (recorded,), "", ())


def test_mps_that_cannot_run(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert "macOS 14" in mps.probe().missing[0]
