"""Optimizers and schedulers as `prepare` hands them back, and optimizers of our own.

Names are loaded at first use: an Accelerator without optimizers loads no engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import at_first_use

if TYPE_CHECKING:
    from .engine import Engine as Engine
    from .foreach import Lion as Lion
    from .fused import FusedOptimizer as FusedOptimizer
    from .layerwise import LAMB as LAMB
    from .layerwise import LARC as LARC
    from .layerwise import NovoGrad as NovoGrad
    from .masters import Masters as Masters
    from .masters import Sums as Sums
    from .muon import Muon as Muon
    from .optimizer import PreparedOptimizer as PreparedOptimizer
    from .optimizer import PreparedScheduler as PreparedScheduler
    from .optimizer import averages_in as averages_in
    from .optimizer import leave_to_step as leave_to_step
    from .optimizer import may_leave as may_leave
    from .torch_optimizers import SGD as SGD
    from .torch_optimizers import Adagrad as Adagrad
    from .torch_optimizers import Adam as Adam
    from .torch_optimizers import AdamW as AdamW
    from .torch_step import fuse as fuse
    from .torch_step import indifferent as indifferent

_HOMES = {
    "engine": ("Engine",),
    "foreach": ("Lion",),
    "fused": ("FusedOptimizer",),
    "layerwise": ("LAMB", "LARC", "NovoGrad"),
    "masters": ("Masters", "Sums"),
    "muon": ("Muon",),
    "optimizer": ("PreparedOptimizer", "PreparedScheduler", "averages_in", "leave_to_step", "may_leave"),
    "torch_optimizers": ("SGD", "Adagrad", "Adam", "AdamW"),
    "torch_step": ("fuse", "indifferent"),
}

if not TYPE_CHECKING:  # see easymp/__init__.py
    __all__, __getattr__, __dir__ = at_first_use(__name__, globals(), _HOMES)
