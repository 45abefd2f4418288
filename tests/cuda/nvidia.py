"""Kernels, as CuPy writes them out, compiled for NVIDIA's architectures by NVRTC; no GPU is needed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from easymp.cuda.cupy_launcher import DEVICE, OPTIONS, elementwise
from easymp.cuda.kernel import PREAMBLE, Kernel


def written(kernel: Kernel) -> str:
    """The text that CuPy makes of `kernel`, after the preamble."""
    from cupy._core import _carray, _kernel, _scalar

    made = elementwise(kernel)
    scalar, indexer = 3, 2  # _ArgKind
    given = [_kernel._ArgInfo(scalar, _scalar.CScalar, p.dtype, 0, True, True) for p in made.in_params]
    given.append(_kernel._ArgInfo(indexer, _carray.Indexer, None, 1, True, True))
    *_, types = made._decide_params_type((None,) * made.nin, ())
    text = _kernel._get_elementwise_kernel_code(
        tuple(given), types, made.params, made.operation, made.name, made.preamble, **made.kwargs
    )
    return text.replace(DEVICE + PREAMBLE, "")


def file_of(kernels: Sequence[Kernel]) -> str:
    """One file of all `kernels`, each named by its number, with what CuPy puts before."""
    from cupy._core import core

    headers = "".join(f"#include <{name}>\n" for name in core._cupy_header_list)
    bodies = [
        re.sub(r"(__global__ void )\w+\(", rf"\g<1>k{n}(", written(kernel), count=1)
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
        m[1]: m[2]
        for m in re.finditer(r"Compiling entry function '(\w+)'(.*?Used \d+ registers)", log, re.DOTALL)
    }
    found = []
    for n, _ in enumerate(kernels):
        said = parts[f"k{n}"]
        stack = max(map(int, re.findall(r"(\d+) bytes stack frame", said)))
        spilled = max(map(int, re.findall(r"(\d+) bytes spill", said)))
        found.append(
            Compiled(int(re.findall(r"Used (\d+) registers", said)[0]), stack, spilled, texts[f"k{n}"])
        )
    return found


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
            nvrtc.compileProgram(
                program, (*options, "--device-as-default-execution-space", "--ptxas-options=-v")
            )
        except nvrtc.NVRTCError as error:
            raise RuntimeError(nvrtc.getProgramLog(program)) from error
        return nvrtc.getPTX(program).decode(), nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)
