"""Facts about this machine: the processor and the accelerators, as frozen records.

Nothing is allocated on a device. With NVIDIA's ``nvidia-ml-py`` installed, and without an accelerator, nothing is
initialised either, so that this process may fork afterwards. The probes are loaded at the first `detect`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import at_first_use

if TYPE_CHECKING:
    from .accelerators import Device as Device
    from .accelerators import Hardware as Hardware
    from .accelerators import describe as describe
    from .accelerators import detect as detect
    from .cpu import CPU as CPU

_HOMES = {"accelerators": ("Device", "Hardware", "describe", "detect"), "cpu": ("CPU",)}

__all__, __getattr__, __dir__ = at_first_use(__name__, globals(), _HOMES)
