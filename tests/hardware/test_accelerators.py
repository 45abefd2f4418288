"""Detection, and the probes of AMD, Intel and Apple over stand-ins for torch's calls."""

import os
import subprocess
import sys
import types

import pytest
import torch

from easymp import detect
from easymp.base import env
from easymp.hardware import accelerators
from easymp.hardware.facts import Found

from .fakes import FakeCard, install, pynvml
from .machines import MACHINES


@pytest.fixture
def fresh():
    """Detection forgets what it saw, before and after."""
    accelerators._detect.cache_clear()
    yield
    accelerators._detect.cache_clear()


def test_asked_again_where_other_devices_are_visible(fresh, monkeypatch):
    install(monkeypatch, pynvml([FakeCard(uuid="GPU-a"), FakeCard(uuid="GPU-b")]))
    with env.override(CUDA_VISIBLE_DEVICES=None):
        assert len(detect().devices) == 2
        with env.override(CUDA_VISIBLE_DEVICES="1"):
            assert len(detect().devices) == 1


def test_without_accelerators_none_is_looked_for(fresh, monkeypatch):
    monkeypatch.setattr(accelerators, "PROBES", (lambda: pytest.fail("looked"),))
    here = detect(use_accelerators=False)
    assert (here.kind, here.vendor, here.devices) == ("cpu", "none", ())
    assert here.looked_for == ("no accelerator was looked for, as asked",)


def test_the_first_find_wins_and_the_misses_before_it_are_told(fresh, monkeypatch):
    card = MACHINES["MI300X"].devices[0]
    missing = Found("nvidia", missing=("no NVIDIA GPU: none",))
    monkeypatch.setattr(
        accelerators,
        "PROBES",
        (lambda: missing, lambda: Found("amd", (card,)), lambda: pytest.fail("looked on")),
    )
    here = detect()
    assert (here.vendor, here.devices, here.looked_for) == ("amd", (card,), ("no NVIDIA GPU: none",))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs hardware whose system forks, such as Linux")
@pytest.mark.skipif(
    torch.version.cuda is not None or torch.version.hip is not None,
    reason="needs hardware without a GPU: torch built for one may have to ask it",
)
def test_nothing_is_initialised_and_a_fork_can_detect():
    code = (
        "import os, torch\n"
        "from easymp.hardware import detect\n"
        "here = detect()\n"
        "assert not torch.cuda.is_initialized()\n"
        "pid = os.fork()\n"
        "if pid == 0: os._exit(0 if detect() == here else 3)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


@pytest.mark.gpu
def test_as_cuda_says(fresh):
    here = detect()
    assert len(here.devices) == torch.cuda.device_count()
    for device in here.devices:
        card = torch.cuda.get_device_properties(device.index)
        assert (device.name, device.capability) == (card.name, (card.major, card.minor))
        assert abs(device.memory - card.total_memory) < 2**28  # NVML counts in other pages
        assert device.bf16 == (card.major >= 8)
        assert device.built_for
        torch.ones(1, device=f"cuda:{device.index}").add_(1)  # there is code for it


@pytest.mark.gpu
def test_nvml_leaves_cuda_asleep():
    pytest.importorskip(
        "pynvml", reason="needs nvidia-ml-py; without it torch is asked, which initialises CUDA"
    )
    code = (
        "import torch\n"
        "from easymp.hardware import detect\n"
        "assert detect().devices and not torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork()\n"
        "import os\n"
        "pid = os.fork()\n"
        "if pid == 0: torch.ones(1, device='cuda'); os._exit(0)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


# -- AMD, Intel and Apple ----------------------------------------------------------------------------------------------


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
    assert accelerators.probe_amd() == ("amd", (rocm_torch,), "", ())


def test_amd_card_without_code(rocm_torch, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["gfx1100"])
    found = accelerators.probe_amd()
    assert not found.devices[0].built_for and "gfx942" in found.missing[0]


def test_a_torch_without_rocm_beside_a_driver(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "hip", None)
    assert "built without ROCm" in accelerators.probe_amd(tmp_path).missing[0]
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    assert "install the ROCm build of torch" in accelerators.probe_amd(tmp_path).missing[0]


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
    assert accelerators.probe_intel() == ("intel", (xpu_torch[0],), "", ())


def test_apple(monkeypatch):
    recorded = MACHINES["M-series Mac"].devices[0]
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: recorded.memory)
    monkeypatch.setattr(accelerators.cpu, "name", lambda: "Apple M3 Max")
    assert accelerators.probe_apple() == ("apple", (recorded,), "", ())
