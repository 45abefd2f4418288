"""Kernels, as CuPy writes them out, compiled for NVIDIA's architectures by NVRTC or nvcc; no GPU is needed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def compiled(kernels: Sequence[Kernel], architecture: str, folder: Path) -> list[Compiled]:
    """All of `kernels` in one compilation, for `architecture` ("90").

    Raises:
        RuntimeError: with the compiler's words.
    """
    ptx, log = (_by_nvrtc if nvrtc() else _by_nvcc)(file_of(kernels), architecture, folder)
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
        import cupy  # noqa: F401
    except ImportError as error:
        return f"CuPy is needed for its text of the kernels: {error}"
    return "" if nvrtc() or nvcc() else "neither NVRTC nor nvcc is installed"


def nvrtc() -> Any:
    """CuPy's binding of NVRTC; None where the library is not found."""
    from cupy_backends.cuda.libs import nvrtc

    try:
        nvrtc.getVersion()
    except RuntimeError:
        return None
    return nvrtc


def nvcc() -> str | None:
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def toolkit() -> tuple[int, int]:
    """Of the compiler that `compiled` runs."""
    if binding := nvrtc():
        return binding.getVersion()
    said = subprocess.run([nvcc() or "nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    major, minor = re.findall(r"release (\d+)\.(\d+)", said)[0]
    return int(major), int(minor)


def _options() -> list[str]:
    from cupy._core import core

    # As cupy.cuda.compiler puts them together.
    return [*core.assemble_cupy_compiler_options(OPTIONS), "-ftz=true"]


def _by_nvrtc(text: str, architecture: str, folder: Path) -> tuple[str, str]:
    binding = nvrtc()
    program = binding.createProgram(text, "kernels.cu", (), ())
    try:
        options = [f"-arch=sm_{architecture}", "--device-as-default-execution-space", "--ptxas-options=-v"]
        try:
            binding.compileProgram(program, (*_options(), *options))
        except binding.NVRTCError as error:
            raise RuntimeError(binding.getProgramLog(program)) from error
        return binding.getPTX(program).decode(), binding.getProgramLog(program)
    finally:
        binding.destroyProgram(program)


def _by_nvcc(text: str, architecture: str, folder: Path) -> tuple[str, str]:
    file = folder / "kernels.cu"
    file.write_text(text)
    command = [
        nvcc() or "nvcc",
        *_options(),
        f"-arch=sm_{architecture}",
        "-Xptxas=-v",
        "--keep",
        f"--keep-dir={folder}",
    ]
    done = subprocess.run(
        [*command, "--cubin", "-o", os.fspath(folder / "out.cubin"), os.fspath(file)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return (folder / "kernels.ptx").read_text(), done.stderr
