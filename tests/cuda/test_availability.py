"""Where kernels cannot run, torch's path does, and the reason is said in words."""

import builtins
import subprocess
import sys

import pytest
import torch

from easymp import EasympWarning, KernelError
from easymp.base import env
from easymp.cuda import cupy_launcher
from easymp.cuda.cupy_launcher import Facts, facts, keep_cache_writable, launcher_for, unavailable

GOOD = Facts(cuda="13.0", hip=None, importable=True, wheels={"cupy-cuda13x": "14.2.0"}, nvidia=True)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(cupy_launcher, "_launchers", {})
    monkeypatch.setattr(cupy_launcher, "_warned", [])


THIRTEEN, TWELVE = {"cupy-cuda13x": "14.2.0"}, {"cupy-cuda12x": "14.2.0"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"cuda": "12.6", "wheels": TWELVE}, None),
        ({"wheels": {"cupy": "14.2.0"}}, None),  # built from source, or conda's: the probe finds out
        ({"wheels": {}}, None),  # a checkout on the path
        ({"cuda": "14.0", "wheels": {"cupy-cuda14x": "15.0"}}, None),
        ({"cuda": None, "hip": "6.4"}, "ROCm"),
        ({"cuda": None}, "without CUDA"),
        ({"nvidia": False}, "NVIDIA GPUs only"),
        ({"importable": False, "wheels": {}}, "pip install 'easymp[cuda13]'"),
        ({"cuda": "12.8"}, "pip uninstall cupy-cuda13x, then pip install 'easymp[cuda12]'"),
        ({"wheels": TWELVE}, "built for CUDA 13.0: pip uninstall cupy-cuda12x"),
        ({"wheels": THIRTEEN | TWELVE}, "pip uninstall cupy-cuda12x"),
        ({"wheels": THIRTEEN | {"cupy": "14.2.0"}}, "cupy and cupy-cuda13x write"),
    ],
)
def test_the_reason(changes, said):
    reason = unavailable(GOOD._replace(**changes))
    assert reason is None if said is None else said in reason


def test_facts_are_had_without_importing_cupy(monkeypatch):
    def no_cupy(name, *args, **kwargs):
        assert not name.startswith("cupy")
        return original(name, *args, **kwargs)

    original = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", no_cupy)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    assert not facts(torch.device("cpu")).nvidia
    assert "cupy" not in sys.modules


@pytest.mark.parametrize(
    "error", [ImportError("no libnvrtc.so.13"), KernelError("nvrtc: error"), OSError(30, "Read-only")]
)
def test_what_fails_at_the_probe_is_one_warning_and_a_reason(monkeypatch, error):
    def fail(launcher):
        raise error

    monkeypatch.setattr(cupy_launcher, "facts", lambda device: GOOD)
    monkeypatch.setattr(cupy_launcher, "probe", fail)
    monkeypatch.setattr(cupy_launcher, "keep_cache_writable", lambda: None)
    with pytest.warns(EasympWarning, match="torch's own steps run instead") as warnings:
        reasons = [launcher_for(torch.device("cuda", n)) for n in range(2)]
    assert len(warnings) == 1
    assert all(isinstance(one, str) and str(error) in one for one in reasons)


def test_a_folder_that_cannot_be_written_leaves_compiled_kernels_in_memory(tmp_path):
    (tmp_path / "home").write_text("no folder")
    unset = {"CUPY_CACHE_DIR": None, "CUPY_CACHE_IN_MEMORY": None}
    with env.override(HOME=str(tmp_path), **unset):
        keep_cache_writable()
        assert env.read("CUPY_CACHE_IN_MEMORY") is env.read("CUPY_CACHE_DIR") is None
    with env.override(HOME=str(tmp_path / "home"), **unset):
        keep_cache_writable()
        assert env.read("CUPY_CACHE_IN_MEMORY") == "1"
        pytest.importorskip("cupy", reason="CuPy, an optional package, is not installed")
        subprocess.run([sys.executable, "-c", "import cupy"], check=True, timeout=100, capture_output=True)
