"""Optimizers and schedulers as `prepare` hands them back, and optimizers of our own.

Names are loaded at first use: an Accelerator that is imported, or prepares no optimizer, does not wait for what steps.
"""

from __future__ import annotations

from ..first_use import at_first_use

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

__all__, __getattr__, __dir__ = at_first_use(__name__, globals(), _HOMES)
