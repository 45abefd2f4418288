"""Asking this machine, once a process."""

from __future__ import annotations

from functools import cache

from ..base import env
from . import cpu, cuda, mps, rocm, xpu
from .facts import Hardware

PROBES = (cuda.probe, rocm.probe, xpu.probe, mps.probe)  # the first that finds something wins


def detect(use_accelerators: bool = True) -> Hardware:
    """The facts about this machine, as this process may use it.

    Asked once a process, and again where ``CUDA_VISIBLE_DEVICES`` has changed since. With ``use_accelerators=False`` only
    the processor is looked at. A missing accelerator is no error: `Hardware.looked_for` says what is not here, and why.
    """
    return _detect(bool(use_accelerators), env.read("CUDA_VISIBLE_DEVICES"))


@cache
def _detect(use_accelerators: bool, visible: str | None) -> Hardware:
    processor = cpu.probe()
    if not use_accelerators:
        return Hardware(processor, looked_for=("no accelerator was looked for, as asked",))
    missing: list[str] = []
    for probe in PROBES:
        found = probe()
        missing.extend(found.missing)
        if found.devices:
            return Hardware(processor, found.devices, found.vendor, found.links, tuple(missing))
    return Hardware(processor, looked_for=tuple(missing))
