"""Kernels on a CPU: their text, compiled by g++, one thread of a block after the other."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from easymp import cuda
from easymp.cuda.kernel import PREAMBLE, THREADS, Kernel
from easymp.optim import torch_step

FLAGS = tuple(os.environ.get("KERNEL_FLAGS", "").split())  # of g++, in a process of test_sanitized
CTYPES = {"uint64": ctypes.c_uint64, "int64": ctypes.c_int64, "float64": ctypes.c_double}
C = {"uint64": "unsigned long long", "int64": "long long", "float64": "double"}

HERE = r"""
#include <math.h>
#include <stddef.h>
#include <string.h>
#define DEVICE static inline
struct alignas(8) uint2 { unsigned int x, y; };
struct alignas(16) uint4 { unsigned int x, y, z, w; };
template <class T> static inline T __ldcs(const T* p) { return *p; }
template <class T> static inline void __stcs(T* p, T v) { *p = v; }
// In the order of a GPU: within each warp of 32, then over the warps.
static inline double total(double (&of)[THREADS]) {
  for (int warp = 0; warp < THREADS; warp += 32)
    for (int n = 16; n; n /= 2)
      for (int t = warp; t < warp + n; ++t) of[t] += of[t + n];
  for (int n = THREADS / 2; n > 16; n /= 2)
    for (int t = 0; t < n; t += 32) of[t] += of[t + n];
  return of[0];
}
static inline float half_to_float(unsigned short b) { _Float16 h; memcpy(&h, &b, 2); return (float)h; }
static inline unsigned short float_to_half(float x) {
  _Float16 h = (_Float16)x; unsigned short b; memcpy(&b, &h, 2); return b;
}
"""


@cache
def source(kernel: Kernel) -> str:
    """The whole C++ file of `kernel`."""
    parameters = ", ".join(f"{C[kind]} {name}" for kind, name in (a.split() for a in kernel.arguments))
    sums = " ".join(f"double {s} = 0.0;" for s in kernel.sums)
    shared = " ".join(f"{s}_of[thread] = {s};" for s in kernel.sums)
    arrays = " ".join(f"double {s}_of[{THREADS}];" for s in kernel.sums)
    totals = " ".join(f"const double {s} = total({s}_of);" for s in kernel.sums)
    return f"""#define THREADS {THREADS}
{HERE}{PREAMBLE}
extern "C" void run(long long blocks, {parameters}) {{
  for (long long block = 0; block < blocks; ++block) {{
    {arrays}
    for (int thread = 0; thread < {THREADS}; ++thread) {{
      {sums}
      {{ {kernel.body} }}
      {shared}
    }}
    {totals}
    {kernel.after}
  }}
}}
"""


COMMAND = "g++ -std=c++17 -O1 -shared -fPIC -Wall -Wextra -Werror -Wno-unknown-pragmas -ffp-contract=off".split()
COMMAND += ["-Wno-unused-parameter"]


@cache
def folder() -> Path:
    """A folder that all processes and sessions of this user share, for this version of g++."""
    version = subprocess.run(["g++", "--version"], capture_output=True, check=True).stdout
    name = f"kernels-{os.getuid()}-{hashlib.sha256(version).hexdigest()[:8]}"
    path = Path(tempfile.gettempdir(), name)
    path.mkdir(mode=0o700, exist_ok=True)
    return path


@cache
def compiled(text: str, arguments: tuple[str, ...], flags: tuple[str, ...]) -> ctypes._CFuncPtr:
    command = [*COMMAND, *flags]
    path = folder() / f"{hashlib.sha256(chr(10).join([text, *command]).encode()).hexdigest()[:16]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder()) as own_folder:
            Path(own_folder, "kernel.cpp").write_text(text)
            command += ["-o", f"{own_folder}/kernel.so", f"{own_folder}/kernel.cpp"]
            process = subprocess.run(command, capture_output=True, text=True)
            assert process.returncode == 0, f"{process.stderr}\n{text}"
            os.replace(f"{own_folder}/kernel.so", path)
    run = ctypes.CDLL(os.fspath(path)).run
    run.argtypes = [ctypes.c_int64, *(CTYPES[a.split()[0]] for a in arguments)]
    run.restype = None
    return run


class CompiledLauncher:
    """A launcher on the CPU."""

    device = torch.device("cpu")

    def __init__(self, flags: tuple[str, ...] = FLAGS) -> None:
        self.launches: list[str] = []
        self._flags = flags

    def compile(self, kernels: Iterable[Kernel]) -> None:
        for kernel in kernels:
            compiled(source(kernel), kernel.arguments, self._flags)

    def launch(self, kernel: Kernel, blocks: int, arguments: Sequence[int | float]) -> None:
        self.launches.append(kernel.name)
        compiled(source(kernel), kernel.arguments, self._flags)(blocks, *arguments)


def kernels_on_cpu(patch: pytest.MonkeyPatch, launcher: object) -> None:
    """Let optimizers on the CPU find `launcher`, as on a GPU."""
    patch.setattr(torch_step, "KERNEL_DEVICES", ("cuda", "cpu"))
    patch.setattr(cuda, "launcher_for", lambda device: launcher)
