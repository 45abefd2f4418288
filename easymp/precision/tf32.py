"""tf32: fp32 storage, matrix products and convolutions on TF32 Tensor Cores (10 bits of mantissa instead of 23)."""

from __future__ import annotations

from typing import ClassVar

from ..protocols import Facts, Refusal
from .fp32 import FP32


class TF32(FP32):
    name: ClassVar[str] = "tf32"
    tf32: ClassVar[bool] = True

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        if facts.device == "cpu":
            return Refusal(
                "TF32 is a mode of GPU Tensor Cores and training runs on the CPU", "use fp32 or bf16"
            )
        without = [d for d in facts.hardware.devices if not d.tf32]
        if without:
            return Refusal(
                f"{without[0].name} has no TF32 Tensor Cores (NVIDIA Ampere, sm_80, and newer do)",
                "use fp32 or auto",
            )
        return None
