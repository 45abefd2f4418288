"""Every kernel compiles for every GPU that the toolkit knows, loads and stores 16 bytes at a time, and keeps its numbers in registers."""

from __future__ import annotations

import pytest

from .kernels import each_rule, every_kernel, few_kernels, vectors
from .nvidia import compiled, toolkit, unavailable

ARCHITECTURES = ("75", "80", "86", "89", "90", "100", "120")
WHOLE = "90"  # for which most kernels are compiled


@pytest.fixture(autouse=True, scope="module")
def compiler():
    if why := unavailable():
        pytest.skip(f"an optional package is not installed: {why}")


def known() -> tuple[str, ...]:
    """The architectures of this toolkit: CUDA 12 has sm_70 as well, and sm_100 and sm_120 from 12.8 on."""
    if toolkit() >= (13, 0):
        return ARCHITECTURES
    return tuple(a for a in ("70", *ARCHITECTURES) if int(a) < 100 or toolkit() >= (12, 8))


def look(kernels, architecture, folder, record):
    for kernel, found in zip(kernels, compiled(kernels, architecture, folder)):
        name = f"{kernel.name} on sm_{architecture}"
        assert (found.stack, found.spilled) == (0, 0), f"{name} does not keep its numbers in registers"
        assert "ld.local" not in found.ptx and "st.local" not in found.ptx, (
            f"{name} has arrays in local memory"
        )
        assert found.registers <= 168, (
            f"{name} takes {found.registers} registers: fewer than 1.5 blocks to a processor"
        )
        for kind, least in vectors(kernel).items():
            assert found.wide(kind) >= least, (
                f"{name}: {found.wide(kind)} {kind} of 16 bytes, its loop has {least}"
            )
            assert found.streaming(kind) == found.wide(kind), (
                f"{name}: {kind} of fewer than 16 bytes in its loop"
            )
        record(f"registers of {name}", found.registers)


def test_each_rule(tmp_path, record_property):
    look(each_rule(), WHOLE, tmp_path, record_property)


@pytest.mark.parametrize("architecture", ["70", *(a for a in ARCHITECTURES if a != WHOLE)])
def test_one_of_each_kind(architecture, tmp_path, record_property):
    if architecture not in known():
        with pytest.raises(RuntimeError, match="architecture"):
            compiled(few_kernels()[:1], architecture, tmp_path)
        return
    look(few_kernels(), architecture, tmp_path, record_property)


@pytest.mark.slow
def test_every_kernel(tmp_path, record_property):
    look(every_kernel(), WHOLE, tmp_path, record_property)
