"""Facts about this machine: the processor and the accelerators, as frozen records.

Nothing is allocated on a device. With NVIDIA's ``nvidia-ml-py`` installed, and without an accelerator, nothing is
initialised either, so that this process may fork afterwards. The probes are loaded at the first `detect`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import at_first_use

if TYPE_CHECKING:
    from .accelerators import detect as detect
    from .facts import CPU as CPU
    from .facts import Device as Device
    from .facts import Hardware as Hardware

_HOMES = {"accelerators": ("detect",), "facts": ("CPU", "Device", "Hardware")}

__all__, __getattr__, __dir__ = at_first_use(__name__, globals(), _HOMES)
