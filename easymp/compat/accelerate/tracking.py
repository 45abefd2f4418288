"""``accelerate.tracking``: what trackers of a script's own derive from."""

from __future__ import annotations

from ...trackers import GeneralTracker, on_main_process
from .layer import layer

__all__ = ["GeneralTracker", "on_main_process"]
OURS = "pass its word to Accelerator(log_with=…), and find it by accelerator.get_tracker(word, unwrap=True)"
__getattr__ = layer.absent(
    "accelerate.tracking",
    dict.fromkeys(("MLflowTracker", "TensorBoardTracker", "WandBTracker"), OURS),
    lambda: __all__,
)
