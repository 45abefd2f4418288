"""Every kernel compiles for each GPU of the toolkit, moves 16 bytes at a time, and keeps its numbers in registers."""

from __future__ import annotations

import pytest

from .kernels import every_kernel, few_kernels, vectors
from .nvidia import compiled, toolkit, unavailable

ARCHITECTURES = ("75", "80", "86", "89", "100", "120")
WHOLE = "90"  # for which all kernels are compiled


@pytest.fixture(autouse=True, scope="module")
def compiler():
    if reason := unavailable():
        pytest.skip(f"an optional package is not installed: {reason}")


def check_kernels(kernels, architecture, record):
    for kernel, result in zip(kernels, compiled(kernels, architecture)):
        name = f"{kernel.name} on sm_{architecture}"
        assert (result.stack, result.spilled) == (0, 0), f"{name} does not keep its numbers in registers"
        assert "ld.local" not in result.ptx and "st.local" not in result.ptx, f"{name} has local arrays"
        assert result.registers <= 168, f"{name} takes {result.registers} registers: below 1.5 blocks a processor"
        for kind, expected in vectors(kernel).items():
            wide = result.wide(kind)
            assert wide >= expected, f"{name}: {wide} {kind} of 16 bytes, its loop has {expected}"
            assert result.streaming(kind) == wide, f"{name}: {kind} of fewer than 16 bytes in its loop"
        record(f"registers of {name}", result.registers)


def test_one_of_each_kind(record_property):
    check_kernels(few_kernels(), WHOLE, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_of_each_kind_on_other_gpus(architecture, record_property):
    if int(architecture) >= 100 and toolkit() < (12, 8):
        with pytest.raises(RuntimeError, match="architecture"):
            compiled(few_kernels()[:1], architecture)
        return
    check_kernels(few_kernels(), architecture, record_property)


@pytest.mark.slow
def test_every_kernel(record_property):
    check_kernels(every_kernel(), WHOLE, record_property)
