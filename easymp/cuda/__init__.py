"""Kernels of our own, for what no compiler fuses: the step after backward.

From its text (`preamble`, `streams`, `rules`) a `Kernel` is compiled by a `Launcher`; `table` says where tensors lie; `step` runs it all.

Names that rooms above want before anything runs on a GPU are loaded at first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "availability": ("warn_once",),
    "gradients": ("Gradients",),
    "measure": ("TOTAL", "UNSCALE"),
    "ready": ("launcher_with",),
    "scale": ("Scale",),
    "table": ("upload",),
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
