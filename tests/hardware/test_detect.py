import os
import subprocess
import sys

import pytest
import torch

import easymp.hardware as hardware
from easymp.base import env
from easymp.hardware import detect, detecting
from easymp.hardware.found import Found

from .fakes import FakeCard, install, pynvml
from .machines import MACHINES


@pytest.fixture
def fresh():
    """Detection forgets what it saw, before and after."""
    detecting._detect.cache_clear()
    yield
    detecting._detect.cache_clear()


def test_the_face():
    assert sorted(hardware.__all__) == ["CPU", "Device", "Hardware", "detect"]


def test_here():
    here = detect()
    assert here.cpu.threads >= 1 and here.cpu.memory > 0
    assert here.kind in {"cpu", "cuda", "xpu", "mps"}
    assert here.devices or len(here.looked_for) == len(detecting.PROBES)
    assert hash(here) == hash(detect())


def test_asked_once():
    assert detect() is detect(use_accelerators=True)
    assert detect(False) is detect(use_accelerators=False)


def test_asked_again_where_other_devices_are_visible(fresh, monkeypatch):
    install(monkeypatch, pynvml([FakeCard(uuid="GPU-a"), FakeCard(uuid="GPU-b")]))
    with env.override(CUDA_VISIBLE_DEVICES=None):
        assert len(detect().devices) == 2
        with env.override(CUDA_VISIBLE_DEVICES="1"):
            assert len(detect().devices) == 1


def test_without_accelerators_none_is_looked_for(fresh, monkeypatch):
    monkeypatch.setattr(detecting, "PROBES", (lambda: pytest.fail("looked"),))
    here = detect(use_accelerators=False)
    assert (here.kind, here.vendor, here.devices) == ("cpu", "none", ())
    assert here.looked_for == ("no accelerator was looked for, as asked",)


def test_the_first_find_wins_and_the_misses_before_it_are_told(fresh, monkeypatch):
    card = MACHINES["MI300X"].devices[0]
    missing = Found("nvidia", missing=("no NVIDIA GPU: none",))
    monkeypatch.setattr(
        detecting,
        "PROBES",
        (lambda: missing, lambda: Found("amd", (card,)), lambda: pytest.fail("looked on")),
    )
    here = detect()
    assert (here.vendor, here.devices, here.looked_for) == ("amd", (card,), ("no NVIDIA GPU: none",))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.skipif(
    torch.version.cuda is not None or torch.version.hip is not None,
    reason="torch for a GPU may have to ask it",
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
