"""``deepspeed.runtime``: what scripts import from inside of DeepSpeed."""

from __future__ import annotations

from ..layer import layer
from . import lr_schedules, utils

__all__ = ["lr_schedules", "utils"]

__getattr__ = layer.absent(
    "deepspeed.runtime",
    {
        "config": "pass the dict or path to deepspeed.initialize(config=…)",
        "engine": "deepspeed.DeepSpeedEngine is the engine",
        "zero": "deepspeed.zero has Init and GatheredParameters",
        "pipe": 'use Accelerator(strategy="pipeline")',
    },
    lambda: __all__,
)
