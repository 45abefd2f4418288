"""tf32: fp32 storage, matrix products and convolutions on TF32 Tensor Cores (10 bits of mantissa instead of 23)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..protocols import Facts, Refusal
from ..records import AutocastKwargs


@dataclass(frozen=True, eq=False)
class TF32:
    name: ClassVar[str] = "tf32"
    param: ClassVar[torch.dtype] = torch.float32
    compute: ClassVar[torch.dtype] = torch.float32
    reduce: ClassVar[torch.dtype] = torch.float32
    scaled: ClassVar[bool] = False
    masters: ClassVar[bool] = False
    swaps: ClassVar[bool] = False
    tf32: ClassVar[bool] = True

    options: AutocastKwargs = AutocastKwargs()

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        if facts.device == "cpu":
            return Refusal("TF32 is a mode of GPU Tensor Cores and training runs on the CPU", "use fp32 or bf16")
        without = [d for d in facts.hardware.devices if not d.tf32]
        if without:
            return Refusal(f"{without[0].name} has no TF32 Tensor Cores (NVIDIA Ampere, sm_80, and newer do)", "use fp32 or auto")
        return None

    @property
    def output(self) -> torch.dtype | None:
        return None

    def decide(self, model: nn.Module) -> None:
        pass

    def convert(self, model: nn.Module) -> nn.Module:
        return model

    def forward(self, model: nn.Module, device: torch.device) -> nn.Module:
        return model

    def casting(self, device: torch.device, options: AutocastKwargs) -> AbstractContextManager[Any]:
        return nullcontext()
