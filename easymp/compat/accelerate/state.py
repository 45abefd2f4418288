"""``accelerate.state``: views of the open run."""

from __future__ import annotations

from ...distributed.processes import DistributedType
from ...training.state import AcceleratorState, GradientState, PartialState
from ...training.state import is_open as is_initialized
from .layer import layer

__all__ = ["AcceleratorState", "DistributedType", "GradientState", "PartialState", "is_initialized"]
__getattr__ = layer.absent("accelerate.state", {}, lambda: __all__)
