"""Optimizers and schedulers as `prepare` hands them back."""

from .fused import fuse
from .items import ItemWindow
from .masters import Masters
from .optimizer import PreparedOptimizer
from .scheduler import PreparedScheduler
from .sums import Sums

__all__ = ["ItemWindow", "Masters", "PreparedOptimizer", "PreparedScheduler", "Sums", "fuse"]
