"""``accelerate.scheduler``."""

from __future__ import annotations

from ...optim import PreparedScheduler as AcceleratedScheduler

__all__ = ["AcceleratedScheduler"]
