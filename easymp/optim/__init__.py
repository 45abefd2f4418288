"""Optimizers and schedulers as `prepare` hands them back."""

from .cupy_engine import CupyEngine
from .engines import Engine, engine_for
from .factor import leave_to_step, may_leave
from .fused import fuse
from .items import ItemWindow
from .masters import Masters
from .optimizer import PreparedOptimizer
from .scheduler import PreparedScheduler
from .sums import Sums
from .swapping import averages_in
from .torch_engine import TorchEngine

__all__ = [
    "CupyEngine",
    "Engine",
    "ItemWindow",
    "Masters",
    "PreparedOptimizer",
    "PreparedScheduler",
    "Sums",
    "TorchEngine",
    "averages_in",
    "engine_for",
    "fuse",
    "leave_to_step",
    "may_leave",
]
