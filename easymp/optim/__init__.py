"""Optimizers and schedulers as `prepare` hands them back."""

from .fused import fuse
from .items import ItemWindow
from .optimizer import PreparedOptimizer
from .scheduler import PreparedScheduler

__all__ = ["ItemWindow", "PreparedOptimizer", "PreparedScheduler", "fuse"]
