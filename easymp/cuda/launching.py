"""Kernels on a GPU: their text, compiled and started by CuPy's ElementwiseKernel.

CuPy makes ``extern "C" __global__`` around a loop ``CUPY_FOR(i, _ind.size())``, a grid-stride loop, and starts
``min(2^31 - 1, size / block_size)`` blocks. With ``size`` a multiple of the block, and fewer blocks than that, each thread goes through
it once and all threads of a block together, so a barrier in it is legal. A start of one thread does nothing: with that a kernel is
compiled and loaded before it is needed, by the public call alone.

Nothing is allocated here, and nothing waits: arguments are numbers, torch owns all memory, and each start is on torch's current stream.
Subnormal float32 numbers are flushed to zero (CuPy passes ``-ftz=true`` to every compilation).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import KernelError
from .kernel import THREADS, Kernel
from .preamble import PREAMBLE

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
