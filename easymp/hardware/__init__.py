"""What is here: the processor and the accelerators, as frozen facts.

One small file a kind of device. Each has a probe, which asks the machine, and where there is something to derive a pure
``facts_for``, which can be asked about any machine. Nothing is allocated on a device. On NVIDIA with ``nvidia-ml-py``
installed, and wherever there is no accelerator, nothing is initialised either, so that a process may fork afterwards;
`cuda`, `rocm` and `xpu` say what happens otherwise. The probes are loaded when a machine is first asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import at_first_use

if TYPE_CHECKING:
    from .detecting import detect as detect
    from .facts import CPU as CPU
    from .facts import Device as Device
    from .facts import Hardware as Hardware

_HOMES = {"detecting": ("detect",), "facts": ("CPU", "Device", "Hardware")}

__all__, __getattr__, __dir__ = at_first_use(__name__, globals(), _HOMES)
