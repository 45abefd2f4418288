"""Optimizers and schedulers as `prepare` hands them back, and optimizers of our own.

Names are loaded at first use: an Accelerator that is imported, or prepares no optimizer, does not wait for what steps.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "adagrad": ("Adagrad",),
    "adam": ("Adam", "AdamW"),
    "cupy_engine": ("CupyEngine",),
    "engines": ("Engine", "engine_for"),
    "factor": ("leave_to_step", "may_leave"),
    "fused": ("fuse",),
    "fusing": ("FusedOptimizer",),
    "items": ("ItemWindow",),
    "lamb": ("LAMB",),
    "larc": ("LARC",),
    "lion": ("Lion",),
    "masters": ("Masters",),
    "novograd": ("NovoGrad",),
    "optimizer": ("PreparedOptimizer",),
    "scheduler": ("PreparedScheduler",),
    "sgd": ("SGD",),
    "sums": ("Sums",),
    "swapping": ("averages_in",),
    "torch_engine": ("TorchEngine",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
