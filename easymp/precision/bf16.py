"""bf16: fp32 parameters, products in bfloat16 under autocast. fp32's range, so no loss scale is needed."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..protocols import Facts, Refusal
from .mixed import Mixed


class BF16(Mixed):
    name: ClassVar[str] = "bf16"
    compute: ClassVar[torch.dtype] = torch.bfloat16

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        without = [d for d in facts.hardware.devices if not d.bf16] if facts.device != "cpu" else []
        if without:
            arch = without[0].architecture or "this device"
            return Refusal(
                f"{without[0].name} ({arch}) has no bf16 units; torch would emulate them",
                "use fp16, fp32 or auto",
            )
        return None  # the CPU runs bf16 with or without instructions for it, and the plan says which
