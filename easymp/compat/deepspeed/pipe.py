"""``deepspeed.pipe`` is not here; importing from it says what to use."""

from __future__ import annotations

from .layer import layer

__getattr__ = layer.absent(
    "deepspeed.pipe",
    dict.fromkeys(("PipelineModule", "LayerSpec", "TiedLayerSpec"), 'use Accelerator(strategy="pipeline")'),
    lambda: ["nothing"],
)
