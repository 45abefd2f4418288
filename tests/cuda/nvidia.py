"""Kernels, as CuPy writes them out, compiled for NVIDIA's architectures by NVRTC; no GPU is needed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from easymp.cuda.cupy_launcher import DEVICE, OPTIONS, elementwise
from easymp.cuda.kernel import PREAMBLE, Kernel


def cupy_source(kernel: Kernel) -> str:
    """The text that CuPy makes of `kernel`, after the preamble."""
    from cupy._core import _carray, _kernel, _scalar

    elementwise_kernel = elementwise(kernel)
    scalar, indexer = 3, 2  # _ArgKind
    arguments = [
        _kernel._ArgInfo(scalar, _scalar.CScalar, p.dtype, 0, True, True) for p in elementwise_kernel.in_params
    ]
    arguments.append(_kernel._ArgInfo(indexer, _carray.Indexer, None, 1, True, True))
    *_, types = elementwise_kernel._decide_params_type((None,) * elementwise_kernel.nin, ())
    text = _kernel._get_elementwise_kernel_code(
        tuple(arguments),
        types,
        elementwise_kernel.params,
        elementwise_kernel.operation,
        elementwise_kernel.name,
        elementwise_kernel.preamble,
        **elementwise_kernel.kwargs,
    )
    return text.replace(DEVICE + PREAMBLE, "")


def file_of(kernels: Sequence[Kernel]) -> str:
    """One file of all `kernels`, each named by its number, with what CuPy puts before."""
    from cupy._core import core

    headers = "".join(f"#include <{name}>\n" for name in core._cupy_header_list)
    bodies = [
        re.sub(r"(__global__ void )\w+\(", rf"\g<1>k{n}(", cupy_source(kernel), count=1)
        for n, kernel in enumerate(kernels)
    ]
    return headers + DEVICE + PREAMBLE + "\n".join(bodies)


@dataclass(frozen=True)
class Compiled:
    """One kernel on one architecture; `stack` and `spilled` in bytes."""

    registers: int
    stack: int
    spilled: int
    ptx: str

    def wide(self, kind: str) -> int:
        """Global accesses of 16 bytes, of `kind` "ld" or "st"."""
        return len(re.findall(rf"{kind}\.global[.\w]*\.v4\.[bu]32", self.ptx))

    def streaming(self, kind: str) -> int:
        return len(re.findall(rf"{kind}\.global[.\w]*\.cs\.", self.ptx))


def compiled(kernels: Sequence[Kernel], architecture: str) -> list[Compiled]:
    """All of `kernels` in one compilation, for `architecture` ("90").

    Raises:
        RuntimeError: with the compiler's words.
    """
    ptx, log = _by_nvrtc(file_of(kernels), architecture)
    texts = dict(re.findall(r"\.visible \.entry (\w+)\((.*?\n\})", ptx, re.DOTALL))
    parts = {
        m[1]: m[2] for m in re.finditer(r"Compiling entry function '(\w+)'(.*?Used \d+ registers)", log, re.DOTALL)
    }
    results = []
    for n, _ in enumerate(kernels):
        kernel_log = parts[f"k{n}"]
        stack = max(map(int, re.findall(r"(\d+) bytes stack frame", kernel_log)))
        spilled = max(map(int, re.findall(r"(\d+) bytes spill", kernel_log)))
        results.append(
            Compiled(int(re.findall(r"Used (\d+) registers", kernel_log)[0]), stack, spilled, texts[f"k{n}"])
        )
    return results


def unavailable() -> str:
    """Why nothing can be compiled here, in words; "" where it can."""
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        return f"CuPy and NVRTC are needed: {error}"
    return ""


def toolkit() -> tuple[int, int]:
    """The version of NVRTC."""
    from cupy_backends.cuda.libs import nvrtc

    return nvrtc.getVersion()


def _by_nvrtc(text: str, architecture: str) -> tuple[str, str]:
    from cupy._core import core
    from cupy_backends.cuda.libs import nvrtc

    # As cupy.cuda.compiler puts them together.
    options = [*core.assemble_cupy_compiler_options(OPTIONS), "-ftz=true", f"-arch=sm_{architecture}"]
    program = nvrtc.createProgram(text, "kernels.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, (*options, "--device-as-default-execution-space", "--ptxas-options=-v"))
        except nvrtc.NVRTCError as error:
            raise RuntimeError(nvrtc.getProgramLog(program)) from error
        return nvrtc.getPTX(program).decode(), nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)
