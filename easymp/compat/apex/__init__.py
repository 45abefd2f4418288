"""NVIDIA Apex for PyTorch: ``from easymp.compat.apex import amp``, on CPUs and GPUs.

Here are `amp` (O0 to O3).
"""

from __future__ import annotations

from . import amp
from .saying import layer

__all__ = ["amp"]

__getattr__ = layer.absent("apex", {}, lambda: __all__)
