"""bf16: fp32 parameters, products in bfloat16 under autocast. fp32's range, so no loss scale is needed."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..protocols import Facts, Refusal
from ..records import AutocastKwargs
from .autocast import autocast, under_autocast


@dataclass(frozen=True, eq=False)
class BF16:
    name: ClassVar[str] = "bf16"
    param: ClassVar[torch.dtype] = torch.float32
    compute: ClassVar[torch.dtype] = torch.bfloat16
    reduce: ClassVar[torch.dtype] = torch.float32
    scaled: ClassVar[bool] = False
    masters: ClassVar[bool] = False
    swaps: ClassVar[bool] = False
    tf32: ClassVar[bool] = True  # for what autocast leaves in fp32

    options: AutocastKwargs = AutocastKwargs()

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        without = [d for d in facts.hardware.devices if not d.bf16] if facts.device != "cpu" else []
        if without:
            arch = without[0].architecture or "this device"
            return Refusal(f"{without[0].name} ({arch}) has no bf16 units; torch would emulate them", "use fp16, fp32 or auto")
        return None  # the CPU runs bf16 with or without instructions for it, and the plan says which

    @property
    def output(self) -> torch.dtype | None:
        return self.options.output_dtype

    def decide(self, model: nn.Module) -> None:
        pass

    def convert(self, model: nn.Module) -> nn.Module:
        return model

    def forward(self, model: nn.Module, device: torch.device) -> nn.Module:
        return under_autocast(model, device, self.compute, self.options)

    def casting(self, device: torch.device, options: AutocastKwargs) -> AbstractContextManager[Any]:
        return autocast(device, self.compute, options)
