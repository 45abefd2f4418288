"""Precision: dtypes as data, the loss scale, and where they touch a model. Adding one is a file and a line here.

Each is loaded when it is first asked for: a run pays for the one it uses.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..first_use import Registry
from ..protocols import Precision
from .measured import Measured
from .scaler import LossScale, Scaler, rule_from

PRECISIONS: Mapping[str, type[Precision]] = Registry(
    __name__,
    {
        "fp32": ("fp32", "FP32"),
        "tf32": ("tf32", "TF32"),
        "bf16": ("bf16", "BF16"),
        "fp16": ("fp16", "FP16"),
        "fp8": ("fp8", "FP8"),
        "O0": ("levels", "O0"),
        "O1": ("levels", "O1"),
        "O2": ("levels", "O2"),
        "O3": ("levels", "O3"),
    },
)
ALIASES = {"no": "fp32", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}

__all__ = ["ALIASES", "PRECISIONS", "LossScale", "Measured", "Precision", "Scaler", "rule_from"]
