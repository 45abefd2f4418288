"""``accelerate.optimizer``."""

from __future__ import annotations

from ...optim import PreparedOptimizer as AcceleratedOptimizer

__all__ = ["AcceleratedOptimizer"]
