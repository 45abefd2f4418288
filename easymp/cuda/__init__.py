"""Kernels of our own, for what no compiler fuses: the step after backward.

From its text (`preamble`, `streams`, `rules`) a `Kernel` is compiled by a `Launcher`; `table` says where tensors lie; `step` runs it all.

Names that rooms above want before anything runs on a GPU are loaded at first use.
"""

from __future__ import annotations

from ..base.lazy import at_first_use

EMA = "ema"  # key of the average in an optimizer's state
_HOMES = {
    "cupy_launcher": ("Unavailable", "facts", "launcher_for", "unavailable", "warn_once"),
    "elementwise": ("TYPES", "upload"),
    "rounding": ("Rounding", "key_of", "stochastic"),
    "rule": ("Scale",),
    "step": ("FusedStep", "takes"),
}

__all__, __getattr__, __dir__ = at_first_use(__name__, globals(), _HOMES)
