"""Where the time and memory of training steps went: torch.profiler around a run, and a table in words of what it recorded.

Names are loaded at first use, so that an Accelerator that profiles nothing does not wait for what profiles.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {"marking": ("marked",), "profile": ("Profile", "Subject")}
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
