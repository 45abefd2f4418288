"""fp16: fp32 parameters, products in float16 under autocast, and a loss scale, since gradients below 6e-8 would vanish.

On a CPU it is really fp16, and slower than fp32 unless the CPU has fp16 arithmetic: for tests, or when asked for.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..errors import PrepareError
from ..protocols import Facts, Refusal
from ..records import AutocastKwargs
from .autocast import autocast, under_autocast


@dataclass(frozen=True, eq=False)
class FP16:
    name: ClassVar[str] = "fp16"
    param: ClassVar[torch.dtype] = torch.float32
    compute: ClassVar[torch.dtype] = torch.float16
    reduce: ClassVar[torch.dtype] = torch.float32
    scaled: ClassVar[bool] = True
    masters: ClassVar[bool] = False
    swaps: ClassVar[bool] = False
    tf32: ClassVar[bool] = True

    options: AutocastKwargs = AutocastKwargs()

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        gtx16 = [d for d in facts.hardware.devices if "GTX 16" in d.name] if facts.device == "cuda" else []
        if gtx16:
            return Refusal(f"{gtx16[0].name} has no Tensor Cores and its fp16 gives NaN", "use fp32 or auto")
        return None

    @property
    def output(self) -> torch.dtype | None:
        return self.options.output_dtype

    def decide(self, model: nn.Module) -> None:
        pass

    def convert(self, model: nn.Module) -> nn.Module:
        for name, parameter in model.named_parameters():
            if parameter.dtype == torch.float16 and parameter.requires_grad:
                raise PrepareError(
                    f"parameter {name!r} is float16, but an fp16 run keeps fp32 parameters and casts in autocast (gradients of fp16 "
                    "parameters cannot be unscaled): drop the .half(), or load the weights with dtype float32"
                )
        return model

    def forward(self, model: nn.Module, device: torch.device) -> nn.Module:
        return under_autocast(model, device, self.compute, self.options)

    def casting(self, device: torch.device, options: AutocastKwargs) -> AbstractContextManager[Any]:
        return autocast(device, self.compute, options)
