"""Optimizers and schedulers as `prepare` hands them back, and optimizers of our own.

Names are loaded at first use: an Accelerator that is imported, or prepares no optimizer, does not wait for what steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import at_first_use

if TYPE_CHECKING:
    from .adagrad import Adagrad as Adagrad
    from .adam import Adam as Adam
    from .adam import AdamW as AdamW
    from .cupy_engine import CupyEngine as CupyEngine
    from .engines import Engine as Engine
    from .engines import engine_for as engine_for
    from .factor import leave_to_step as leave_to_step
    from .factor import may_leave as may_leave
    from .fusing import FusedOptimizer as FusedOptimizer
    from .items import ItemWindow as ItemWindow
    from .lamb import LAMB as LAMB
    from .larc import LARC as LARC
    from .lion import Lion as Lion
    from .masters import Masters as Masters
    from .novograd import NovoGrad as NovoGrad
    from .optimizer import PreparedOptimizer as PreparedOptimizer
    from .scheduler import PreparedScheduler as PreparedScheduler
    from .sgd import SGD as SGD
    from .sums import Sums as Sums
    from .swapping import averages_in as averages_in
    from .torch_engine import TorchEngine as TorchEngine
    from .torch_step import fuse as fuse
    from .torch_step import indifferent as indifferent

_HOMES = {
    "adagrad": ("Adagrad",),
    "adam": ("Adam", "AdamW"),
    "cupy_engine": ("CupyEngine",),
    "engines": ("Engine", "engine_for"),
    "factor": ("leave_to_step", "may_leave"),
    "fused": ("fuse",),
    "fusing": ("FusedOptimizer",),
    "hooks": ("indifferent",),
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
