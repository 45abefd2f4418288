"""Kernels of our own for the step after backward, which no compiler fuses.

`rule` and `kernel` write the text of a `Kernel`, `cupy_launcher` compiles and launches it, `step` runs all of them.
Names are loaded at first use, so that a process without a GPU loads none of them.
"""

from __future__ import annotations

from ..base.lazy import at_first_use

EMA = "ema"  # key of the average in an optimizer's state
_HOMES = {
    "cupy_launcher": ("facts", "launcher_for", "unavailable", "warn_once"),
    "kernel": ("Rounding", "TYPES", "key_of", "stochastic", "upload"),
    "rule": ("complete",),
    "step": ("FusedStep", "steps"),
}

__all__, __getattr__, __dir__ = at_first_use(__name__, globals(), _HOMES)
