"""Checkpoints: sharded safetensors and JSON, committed at once, verified, read by any number of ranks. Reading runs no code.

Names are loaded at first use, so that the command line can list its commands without waiting for torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "accelerate_folder": ("AccelerateStates", "read_accelerate"),
    "comparing": ("Difference", "diff"),
    "catalog": ("Entry", "list_checkpoints"),
    "inspecting": ("Contents", "inspect"),
    "merging": ("merge",),
    "progress": ("Progress",),
    "pruning": ("Pruned", "prune"),
    "verifying": ("Damage", "verify"),
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
