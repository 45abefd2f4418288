"""Where the values that a run logs are kept: a file of JSON lines, TensorBoard, Weights & Biases, MLflow, or one's own.

Names are loaded at first use: a run that logs nothing waits for none of this, and one that logs only for what it asked for.
"""

from __future__ import annotations

from ..base.lazy import at_first_use

# Each tracker by name: its module and class. Adding one is its own file, a line here, and an extra of the package that it needs.
TRACKERS = {
    "jsonl": ("jsonl", "JsonLines"),
    "tensorboard": ("tensorboard", "TensorBoard"),
    "wandb": ("wandb", "WandB"),
    "mlflow": ("mlflow", "MLflow"),
}
OPTIONS = ("tensorboard", "wandb")  # those whose `log` takes more than values and a step
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
_HOMES = {"own": ("GeneralTracker", "on_main_process")}
_INNER = {
    "logbook": ("Logbook",),
    "choosing": ("choose", "words_of"),
    "silent": ("SILENT",),
    "rows": ("Row", "checked_step", "checked_values"),
}

__all__, __getattr__, __dir__ = at_first_use(__name__, globals(), _HOMES, _INNER)
__all__ += ["TRACKERS"]  # the very list that __dir__ gives
