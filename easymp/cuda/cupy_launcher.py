"""Kernels launched on a GPU by CuPy; and whether they run on a device, or why not, in words for the plan.

`unavailable` reasons about what is installed without importing CuPy (0.5 s, and a wrong wheel loads wrong libraries). What passes
that is tried once a device with a kernel whose answer is known. Nothing here raises: torch's own path is always there.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from ..base import env
from ..errors import EasympWarning, KernelError
from .kernel import PREAMBLE, THREADS, Kernel

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


# -- the launcher -------------------------------------------------------------------------------------------------------

# CuPy makes ``extern "C" __global__`` around a grid-stride loop ``CUPY_FOR(i, _ind.size())``, and starts
# ``min(2^31 - 1, size / block_size)`` blocks. With ``size`` a multiple of the block, and fewer blocks than that, each thread goes
# through it once and all threads of a block together, so a barrier in it is legal. A start of one thread does nothing: with that a
# kernel is compiled and loaded before it is needed. Nothing is allocated here, and nothing waits: arguments are numbers, torch owns all
# memory, and each start is on torch's current stream. Subnormal float32 numbers are flushed to zero (CuPy passes ``-ftz=true``).


OPTIONS = ("--std=c++17",)
MOST_BLOCKS = 2**31 - 1
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
    """What stands in the loop of `kernel`."""
    zeros = " ".join(f"double {s} = 0.0;" for s in kernel.sums)
    finish = kernel.after
    if kernel.sums:
        warps = " ".join(
            f"{s} = over_lanes<32>({s}); if (!(thread & 31)) {s}_of[thread >> 5] = {s};" for s in kernel.sums
        )
        totals = " ".join(
            f"{s} = over_lanes<{_WARPS}>(thread < {_WARPS} ? {s}_of[thread] : 0.0);" for s in kernel.sums
        )
        finish = f"{warps}\n__syncthreads();\nif (thread < 32) {{ {totals} if (thread == 0) {{ {kernel.after} }} }}"
    return f"""
if (_ind.size() >= {THREADS}) {{
const i64 block = blockIdx.x; (void)block;
const int thread = threadIdx.x; (void)thread;
{zeros}
{{ {kernel.body} }}
{finish}
}}
"""


def elementwise(kernel: Kernel) -> Any:
    """`kernel` as a cupy.ElementwiseKernel, which compiles when it is first called on a device."""
    import cupy  # optional

    shared = "".join(f"__shared__ double {s}_of[{_WARPS}];\n" for s in kernel.sums)
    return cupy.ElementwiseKernel(
        ", ".join(kernel.arguments),
        "",
        operation(kernel),
        kernel.name,
        preamble=DEVICE + PREAMBLE,
        options=OPTIONS,
        loop_prep=shared,
        no_return=True,
    )


@dataclass(frozen=True, slots=True)
class _Stream:
    ptr: int


def current_stream(index: int) -> int:
    """The address of torch's current stream on CUDA device `index`, as torch's own compiled code asks for it: no object is made."""
    return torch._C._cuda_getCurrentRawStream(index)


class CupyLauncher:
    """Launches on one CUDA device. Made by `availability.launcher_for`, which says why there is none."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._index = device.index
        self._kernels: dict[Kernel, Any] = {}

    def ready(self, kernels: Iterable[Kernel]) -> None:
        """Compile and load those of `kernels` that are not, before the first of them changes anything. Not while a graph is captured.

        Raises:
            KernelError: one of them cannot be compiled or loaded.
        """
        for kernel in kernels:
            if kernel not in self._kernels:
                self._kernels[kernel] = self._loaded(kernel)

    def launch(self, kernel: Kernel, blocks: int, arguments: Sequence[int | float]) -> None:
        """See `Launcher.launch`."""
        function = self._kernels.get(kernel)
        if function is None:
            self.ready([kernel])
            function = self._kernels[kernel]
        if not 0 < blocks <= MOST_BLOCKS:
            raise KernelError(f"{kernel.name} was given {blocks} blocks: a launch takes 1 to {MOST_BLOCKS}")
        try:
            with torch.cuda.device(self._index):
                function(
                    *arguments,
                    size=blocks * THREADS,
                    block_size=THREADS,
                    stream=_Stream(current_stream(self._index)),
                )
        except Exception as error:
            raise KernelError(f"{kernel.name} cannot be started on {self.device}: {_said(error)}") from error

    def _loaded(self, kernel: Kernel) -> Any:
        try:
            function = elementwise(kernel)
            zeros = [0] * len(kernel.arguments)
            with torch.cuda.device(self._index):
                function(*zeros, size=1, block_size=THREADS, stream=_Stream(current_stream(self._index)))
        except Exception as error:
            raise KernelError(
                f"{kernel.name} cannot be compiled for {self.device}: {_said(error)}"
            ) from error
        return function


def _said(error: Exception) -> str:
    """Type and first words of `error`, in one line: a compiler's log is long."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
