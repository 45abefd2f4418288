"""Whether our kernels run on a device, and if not, why: in words, for the plan.

`unavailable` reasons about what is installed without importing CuPy (0.5 s, and a wrong wheel loads wrong libraries). What passes
that is tried once a device with a kernel whose answer is known. Nothing here raises: torch's own path is always there.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from ..base import env
from ..errors import EasympWarning, KernelError
from .kernel import THREADS, Kernel
from .launching import CupyLauncher

# Oldest compute capability that a CUDA toolkit compiles for, by its major version (release notes of CUDA 12.0 and 13.0).
OLDEST = {12: (5, 0), 13: (7, 5)}
# Distributions of CuPy, by the CUDA that they are for: wheels of 11 and newer, and what is built from source or comes with conda.
WHEELS = {"cupy": None, **{f"cupy-cuda{major}x": major for major in range(11, 20)}}


@dataclass(frozen=True)
class Facts:
    """What `unavailable` looks at.

    Attributes:
        cuda, hip: what torch was built for, as torch.version has them.
        importable: whether there is a module cupy.
        wheels: distributions of CuPy by name, with their versions.
        capability: of the device; None for others than NVIDIA's.
    """

    cuda: str | None
    hip: str | None
    importable: bool
    wheels: Mapping[str, str]
    capability: tuple[int, int] | None


@dataclass(frozen=True)
class Unavailable:
    """Why there are no kernels."""

    reason: str


def facts(device: torch.device) -> Facts:
    """Of this process and `device`, with an index if it is a GPU."""
    wheels = {}
    for name in WHEELS:
        try:
            wheels[name] = version(name)
        except PackageNotFoundError:
            pass
    return Facts(
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        importable=find_spec("cupy") is not None,
        wheels=wheels,
        capability=torch.cuda.get_device_capability(device)
        if device.type == "cuda" and torch.version.hip is None
        else None,
    )


def unavailable(facts: Facts) -> str | None:
    """Why kernels cannot run by what is known from outside; None where they may."""
    if facts.hip is not None:
        return "our kernels are CUDA's: torch is built for ROCm"
    if facts.cuda is None:
        return "torch is built without CUDA"
    if facts.capability is None:
        return "our kernels run on NVIDIA GPUs only"
    major = int(facts.cuda.split(".")[0])
    extra = f"pip install 'easymp[cuda{major}]'"
    if len(facts.wheels) > 1:
        names = sorted(facts.wheels)
        return f"{' and '.join(names)} write over one another: pip uninstall {' '.join(names)}, then {extra}"
    if not facts.importable:
        return f"CuPy is not installed: {extra}"
    for name in facts.wheels:
        if WHEELS[name] not in (None, major):
            return f"{name} is installed, but torch is built for CUDA {facts.cuda}: pip uninstall {name}, then {extra}"
    oldest = OLDEST.get(major, OLDEST[max(OLDEST)])
    if facts.capability < oldest:
        return (
            f"CUDA {major} compiles for compute capability {oldest[0]}.{oldest[1]} and newer, and this GPU has "
            f"{facts.capability[0]}.{facts.capability[1]}"
        )
    return None


_launchers: dict[torch.device, CupyLauncher | Unavailable] = {}
_warned: list[str] = []


def launcher_for(device: torch.device) -> CupyLauncher | Unavailable:
    """The launcher of `device`, the same one at each call, or why there is none.

    The first call for a device compiles a kernel and waits for it, so it comes before any CUDA graph is captured. Where CuPy is installed
    and fails, an EasympWarning says so, once a process.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device not in _launchers:
        _launchers[device] = _try(device)
    return _launchers[device]


def _try(device: torch.device) -> CupyLauncher | Unavailable:
    seen = facts(device)
    reason = unavailable(seen)
    if reason is None:
        launcher = CupyLauncher(device)
        try:
            keep_cache_writable()
            probe(launcher)
        except Exception as error:  # whatever is wrong with an optional package, training goes on without it
            reason = str(error) if isinstance(error, KernelError) else f"{type(error).__name__}: {error}"
        else:
            return launcher
    if seen.wheels and seen.capability is not None:
        warn_once(reason)
    return Unavailable(reason)


def warn_once(reason: str) -> None:
    """Say that kernels fail here though CuPy is installed: once a process, whatever the device or kernel."""
    if not _warned:
        _warned.append(reason)
        warnings.warn(
            f"CuPy's kernels cannot be used, torch's own steps run instead: {reason}",
            EasympWarning,
            stacklevel=3,
        )


# Each thread adds its number, by way of half precision, times `scale`, and `more`: arguments, sums and stores are seen to work.
PROBE = Kernel(
    "probe",
    ("uint64 out", "int64 more", "float64 scale"),
    "u16 bits = float_to_half((float)thread); sum += half_to_float(bits) * scale + (double)more;",
    ("sum",),
    "at<double>(out)[block] = sum;",
)


def probe(launcher: CupyLauncher) -> None:
    """Run `PROBE` on two blocks and look at what it wrote.

    Raises:
        KernelError: it cannot be compiled or started, or its answer is wrong.
    """
    out = torch.zeros(2, dtype=torch.float64, device=launcher.device)
    launcher.launch(PROBE, 2, [out.data_ptr(), 3, 0.5])
    expected = 0.5 * THREADS * (THREADS - 1) / 2 + 3 * THREADS
    if out.tolist() != [expected, expected]:
        raise KernelError(f"a kernel on {launcher.device} wrote {out.tolist()} where {expected} was due")


def keep_cache_writable() -> None:
    """CuPy fails at its import, or at a compilation, where its folder of compiled kernels cannot be written: then keep them in memory."""
    folder = env.read("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        # CuPy makes the folder if it is not there, even if it then writes nothing into it: this one is there.
        env.put({"CUPY_CACHE_DIR": tempfile.gettempdir(), "CUPY_CACHE_IN_MEMORY": "1"})
