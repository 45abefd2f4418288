"""Optimizers and schedulers as `prepare` hands them back, and optimizers of our own, which are loaded at first use."""

import importlib
from typing import Any

from .cupy_engine import CupyEngine
from .engines import Engine, engine_for
from .factor import leave_to_step, may_leave
from .fused import fuse
from .fusing import FusedOptimizer
from .items import ItemWindow
from .masters import Masters
from .optimizer import PreparedOptimizer
from .scheduler import PreparedScheduler
from .sums import Sums
from .swapping import averages_in
from .torch_engine import TorchEngine

_HOMES = {
    "AdamW": "adam",
    "Adam": "adam",
    "SGD": "sgd",
    "Adagrad": "adagrad",
    "Lion": "lion",
    "LAMB": "lamb",
    "NovoGrad": "novograd",
    "LARC": "larc",
}

__all__ = [
    *_HOMES,
    "CupyEngine",
    "Engine",
    "FusedOptimizer",
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'easymp.optim' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value
