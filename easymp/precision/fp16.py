"""fp16: fp32 parameters, products in float16 under autocast, and a loss scale, since gradients below 6e-8 would vanish.

On a CPU it is really fp16, and slower than fp32 unless the CPU has fp16 arithmetic: for tests, or when asked for.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from ..protocols import Facts, Refusal
from .mixed import Mixed


class FP16(Mixed):
    name: ClassVar[str] = "fp16"
    compute: ClassVar[torch.dtype] = torch.float16
    scaled: ClassVar[bool] = True

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        gtx16 = [d for d in facts.hardware.devices if "GTX 16" in d.name] if facts.device == "cuda" else []
        if gtx16:
            return Refusal(f"{gtx16[0].name} has no Tensor Cores and its fp16 gives NaN", "use fp32 or auto")
        return None
