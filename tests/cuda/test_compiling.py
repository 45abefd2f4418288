"""Every kernel compiles for every GPU that the toolkit knows, loads and stores 16 bytes at a time, and keeps its numbers in registers."""

from __future__ import annotations

import pytest

from .kernels import every_kernel, few_kernels, vectors
from .nvidia import compiled, toolkit, unavailable

ARCHITECTURES = ("75", "80", "86", "89", "100", "120")
WHOLE = "90"  # for which all kernels are compiled


@pytest.fixture(autouse=True, scope="module")
def compiler():
    if why := unavailable():
        pytest.skip(f"an optional package is not installed: {why}")


def look(kernels, architecture, record):
    for kernel, found in zip(kernels, compiled(kernels, architecture)):
        name = f"{kernel.name} on sm_{architecture}"
        assert (found.stack, found.spilled) == (0, 0), f"{name} does not keep its numbers in registers"
        assert "ld.local" not in found.ptx and "st.local" not in found.ptx, f"{name} has local arrays"
        assert found.registers <= 168, (
            f"{name} takes {found.registers} registers: below 1.5 blocks a processor"
        )
        for kind, least in vectors(kernel).items():
            wide = found.wide(kind)
            assert wide >= least, f"{name}: {wide} {kind} of 16 bytes, its loop has {least}"
            assert found.streaming(kind) == wide, f"{name}: {kind} of fewer than 16 bytes in its loop"
        record(f"registers of {name}", found.registers)


def test_one_of_each_kind(record_property):
    look(few_kernels(), WHOLE, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_of_each_kind_on_other_gpus(architecture, record_property):
    if int(architecture) >= 100 and toolkit() < (12, 8):
        with pytest.raises(RuntimeError, match="architecture"):
            compiled(few_kernels()[:1], architecture)
        return
    look(few_kernels(), architecture, record_property)


@pytest.mark.slow
def test_every_kernel(record_property):
    look(every_kernel(), WHOLE, record_property)
