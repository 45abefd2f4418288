"""Kernels launched on a GPU by CuPy; and the reason, for the plan, why they cannot run on a device.

`unavailable` judges by the installed packages, without importing CuPy (0.5 s, and a wrong wheel loads wrong libraries).
A device that passes is tried once with a kernel of known answer. Nothing here raises: torch's own path is always there.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ..base import env
from ..errors import EasympWarning, KernelError
from .kernel import PREAMBLE, THREADS, Kernel

# Distributions of CuPy, by their CUDA version: wheels of 11 and newer; None for a build from source or conda's.
WHEELS = {"cupy": None, **{f"cupy-cuda{major}x": major for major in range(11, 20)}}


class Facts(NamedTuple):
    """What `unavailable` decides by."""

    cuda: str | None  # the version that torch was built for, as torch.version has it
    hip: str | None
    importable: bool  # whether there is a module cupy
    wheels: Mapping[str, str]  # distributions of CuPy by name, with their versions
    nvidia: bool  # whether the device is an NVIDIA GPU


def facts(device: torch.device) -> Facts:
    """Of this process and `device`, with an index if it is a GPU."""
    wheels = {}
    for name in WHEELS:
        try:
            wheels[name] = version(name)
        except PackageNotFoundError:
            pass
    nvidia = device.type == "cuda" and torch.version.hip is None
    return Facts(torch.version.cuda, torch.version.hip, find_spec("cupy") is not None, wheels, nvidia)


def unavailable(facts: Facts) -> str | None:
    """Why kernels cannot run, as far as `facts` say; None where they may."""
    cuda, hip, importable, wheels, nvidia = facts
    if hip is not None:
        return "our kernels are CUDA's: torch is built for ROCm"
    if cuda is None:
        return "torch is built without CUDA"
    if not nvidia:
        return "our kernels run on NVIDIA GPUs only"
    major = int(cuda.split(".")[0])
    extra = f"pip install 'easymp[cuda{major}]'"
    if len(wheels) > 1:
        names = sorted(wheels)
        return f"{' and '.join(names)} write over one another: pip uninstall {' '.join(names)}, then {extra}"
    if not importable:
        return f"CuPy is not installed: {extra}"
    for name in wheels:
        if WHEELS[name] not in (None, major):
            return f"{name} is installed, but torch is built for CUDA {cuda}: pip uninstall {name}, then {extra}"
    return None


_launchers: dict[torch.device, CupyLauncher | str] = {}
_warned: list[str] = []


def launcher_for(device: torch.device) -> CupyLauncher | str:
    """The launcher of `device`, the same one at each call, or why there is none.

    The first call compiles a kernel and waits for it, before any CUDA graph is captured. Warns once if CuPy fails.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device not in _launchers:
        _launchers[device] = _try(device)
    return _launchers[device]


def _try(device: torch.device) -> CupyLauncher | str:
    packages = facts(device)
    reason = unavailable(packages)
    if reason is None:
        launcher = CupyLauncher(device)
        try:
            keep_cache_writable()
            probe(launcher)
            return launcher
        except Exception as error:  # any fault of an optional package: training goes on without it
            reason = str(error) if isinstance(error, KernelError) else f"{type(error).__name__}: {error}"
    if packages.wheels and packages.nvidia:
        warn_once(reason)
    return reason


def warn_once(reason: str) -> None:
    """Warn, once a process, that kernels fail here though CuPy is installed."""
    if not _warned:
        _warned.append(reason)
        message = f"CuPy's kernels cannot be used, torch's own steps run instead: {reason}"
        warnings.warn(message, EasympWarning, stacklevel=3)


# Each thread adds its number, by way of half precision, times `scale`, and `offset`.
PROBE = Kernel(
    "probe",
    ("uint64 out", "int64 offset", "float64 scale"),
    "u16 bits = float_to_half((float)thread); sum += half_to_float(bits) * scale + (double)offset;",
    ("sum",),
    "at<double>(out)[block] = sum;",
)


def probe(launcher: CupyLauncher) -> None:
    """Run `PROBE` on two blocks; KernelError if it cannot be compiled or started, or its answer is wrong."""
    sums = torch.zeros(2, dtype=torch.float64, device=launcher.device)
    launcher.launch(PROBE, 2, [sums.data_ptr(), 3, 0.5])
    expected = 0.5 * THREADS * (THREADS - 1) / 2 + 3 * THREADS
    if sums.tolist() != [expected, expected]:
        raise KernelError(f"a kernel on {launcher.device} wrote {sums.tolist()} where {expected} was due")


def keep_cache_writable() -> None:
    """Keep compiled kernels in memory if CuPy cannot write its folder. Else its import or a compilation would fail."""
    folder = env.read("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        # CuPy makes the folder if it is not there, even if it then writes nothing into it: this one is there.
        env.put({"CUPY_CACHE_DIR": tempfile.gettempdir(), "CUPY_CACHE_IN_MEMORY": "1"})


# -- the launcher ------------------------------------------------------------------------------------------------------

# CuPy makes ``extern "C" __global__`` around a grid-stride loop ``CUPY_FOR(i, _ind.size())``, and starts
# ``min(2^31 - 1, size / block_size)`` blocks. With ``size`` a multiple of the block, each thread runs the loop once and
# all threads of a block together, so a barrier in it is legal. A start of one thread does nothing: it compiles and
# loads a kernel before it is needed. Nothing is allocated or waited for: arguments are numbers, torch owns all memory,
# and each start is on torch's current stream. Subnormal float32 numbers are flushed to zero (CuPy passes
# ``-ftz=true``).

OPTIONS = ("--std=c++17",)
_WARPS = THREADS // 32

# The order of a sum: lanes 16, 8, 4, 2, 1 apart within each warp, then the warps 4, 2, 1 apart.
DEVICE = r"""
#define DEVICE __device__ __forceinline__
DEVICE float half_to_float(unsigned short bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
DEVICE unsigned short float_to_half(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
template <int N> DEVICE double over_lanes(double x) {
#pragma unroll
  for (int n = N / 2; n; n /= 2) x += __shfl_down_sync(0xffffffffu, x, n);
  return x;
}
"""


def operation(kernel: Kernel) -> str:
    """The text in the loop of `kernel`."""
    finish = kernel.after
    if kernel.sums:
        warps = "".join(
            f"{s} = over_lanes<32>({s}); if (!(thread & 31)) {s}_of[thread >> 5] = {s};\n" for s in kernel.sums
        )
        totals = " ".join(f"{s} = over_lanes<{_WARPS}>(thread < {_WARPS} ? {s}_of[thread] : 0.0);" for s in kernel.sums)
        finish = f"{warps}__syncthreads();\nif (thread < 32) {{ {totals} if (thread == 0) {{ {kernel.after} }} }}"
    return f"""
if (_ind.size() >= {THREADS}) {{
const i64 block = blockIdx.x; (void)block;
const int thread = threadIdx.x; (void)thread;
{" ".join(f"double {s} = 0.0;" for s in kernel.sums)}
{{ {kernel.body} }}
{finish}
}}
"""


def elementwise(kernel: Kernel) -> Any:
    """`kernel` as a cupy.ElementwiseKernel, which compiles when it is first called on a device."""
    import cupy  # type: ignore[import-untyped]  # optional, without types

    return cupy.ElementwiseKernel(
        ", ".join(kernel.arguments),
        "",
        operation(kernel),
        kernel.name,
        preamble=DEVICE + PREAMBLE,
        options=OPTIONS,
        loop_prep="".join(f"__shared__ double {s}_of[{_WARPS}];\n" for s in kernel.sums),
        no_return=True,
    )


class CupyLauncher:
    """Runs kernels on one CUDA device, in the order of torch's current stream there. Tests use a launcher with g++."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kernels: dict[Kernel, Any] = {}

    def compile(self, kernels: Iterable[Kernel]) -> None:
        """Compile and load `kernels`, each once; KernelError if one fails. Not inside the capture of a CUDA graph."""
        for kernel in kernels:
            if kernel not in self._kernels:
                try:
                    function = elementwise(kernel)
                    self._start(function, 1, [0] * len(kernel.arguments))
                except Exception as error:
                    raise self._error(kernel, "compiled", error) from error
                self._kernels[kernel] = function

    def launch(self, kernel: Kernel, blocks: int, arguments: Sequence[int | float]) -> None:
        """Start `kernel` on `blocks` blocks, without a wait for the device; KernelError if it cannot start."""
        self.compile([kernel])
        try:
            self._start(self._kernels[kernel], blocks * THREADS, arguments)
        except Exception as error:
            raise self._error(kernel, "started", error) from error

    def _error(self, kernel: Kernel, action: str, error: Exception) -> KernelError:
        message = " ".join(str(error).split())[:300]  # a compiler's log is long
        return KernelError(f"{kernel.name} cannot be {action} on {self.device}: {type(error).__name__}: {message}")

    def _start(self, function: Any, size: int, arguments: Sequence[int | float]) -> None:
        index = self.device.index
        with torch.cuda.device(index):
            # The address of torch's current stream, as torch's own compiled code asks for it.
            stream = SimpleNamespace(ptr=torch._C._cuda_getCurrentRawStream(index))
            function(*arguments, size=size, block_size=THREADS, stream=stream)
