"""Precision: dtypes as data, the loss scale, and where they touch a model. Adding one is a file and a line here."""

from ..protocols import Precision
from .bf16 import BF16
from .fp8 import FP8
from .fp16 import FP16
from .fp32 import FP32
from .levels import O0, O1, O2, O3
from .measured import Measured
from .scaler import LossScale, Scaler, rule_from
from .tf32 import TF32

PRECISIONS: dict[str, type[Precision]] = {
    "fp32": FP32,
    "tf32": TF32,
    "bf16": BF16,
    "fp16": FP16,
    "fp8": FP8,
    "O0": O0,
    "O1": O1,
    "O2": O2,
    "O3": O3,
}
ALIASES = {"no": "fp32", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}

__all__ = [
    "ALIASES",
    "BF16",
    "FP16",
    "FP8",
    "FP32",
    "PRECISIONS",
    "TF32",
    "LossScale",
    "Measured",
    "O0",
    "O1",
    "O2",
    "O3",
    "Precision",
]
__all__ += ["Scaler", "rule_from"]
