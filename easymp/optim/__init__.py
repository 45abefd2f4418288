"""Optimizers and schedulers as `prepare` hands them back, the engine of their steps, and optimizers that torch lacks.

Names are loaded at first use: an Accelerator without optimizers loads no engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import at_first_use
from ..errors import OPTIMIZER_REMEDY

if TYPE_CHECKING:
    from .engine import Engine as Engine
    from .engine import EngineOptions as EngineOptions
    from .masters import Masters as Masters
    from .masters import Sums as Sums
    from .muon import Muon as Muon
    from .optimizer import PreparedOptimizer as PreparedOptimizer
    from .optimizer import PreparedScheduler as PreparedScheduler
    from .optimizer import can_clip_in_step as can_clip_in_step
    from .optimizer import clip_in_step as clip_in_step
    from .own_optimizers import LAMB as LAMB
    from .own_optimizers import LARC as LARC
    from .own_optimizers import Lion as Lion
    from .own_optimizers import NovoGrad as NovoGrad
    from .torch_step import OwnOptimizer as OwnOptimizer
    from .torch_step import fuse as fuse
    from .torch_step import fuses as fuses

_HOMES = {
    "engine": ("Engine", "EngineOptions"),
    "masters": ("Masters", "Sums"),
    "muon": ("Muon",),
    "optimizer": ("PreparedOptimizer", "PreparedScheduler", "clip_in_step", "can_clip_in_step"),
    "own_optimizers": ("LAMB", "LARC", "Lion", "NovoGrad"),
    "torch_step": ("OwnOptimizer", "fuse", "fuses"),
}
# Names of earlier versions.
_ELSEWHERE = {
    name: f"use torch.optim.{name}, which prepare steps by the same kernels; "
    f"of the options ema_decay, state_dtype and stochastic_rounding: {OPTIMIZER_REMEDY}"
    for name in ("Adam", "AdamW", "SGD", "Adagrad")
}
_ELSEWHERE["FusedOptimizer"] = "use easymp.optim.Engine(optimizer), which clips, averages and steps by kernels"

if not TYPE_CHECKING:  # see easymp/__init__.py
    __all__, __getattr__, __dir__ = at_first_use(__name__, globals(), _HOMES, elsewhere=_ELSEWHERE)
