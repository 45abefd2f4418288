"""Where the values that a run logs are kept: a file of JSON lines, TensorBoard, Weights & Biases, MLflow, or one's own.

Names are loaded at first use: a run that logs nothing waits for none of this, and one that logs only for what it asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

# Each tracker by name: its module and class. Adding one is its own file, a line here, and an extra of the package that it needs.
TRACKERS = {
    "jsonl": ("jsonl", "JsonLines"),
    "tensorboard": ("tensorboard", "TensorBoard"),
    "wandb": ("wandb", "WandB"),
    "mlflow": ("mlflow", "MLflow"),
}
OPTIONS = ("tensorboard", "wandb")  # those whose `log` takes more than values and a step
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
_HOMES = {
    "logbook": ("Logbook",),
    "choosing": ("choose", "words_of"),
    "own": ("GeneralTracker", "on_main_process"),
    "silent": ("SILENT",),
    "rows": ("Row", "checked_step", "checked_values"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["TRACKERS", "GeneralTracker", "on_main_process"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
