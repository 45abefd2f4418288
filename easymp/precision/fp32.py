"""fp32 and tf32. fp32 casts nothing and leaves torch's TF32 flags as the user set them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..options import AutocastKwargs
from ..protocols import Facts, Refusal


@dataclass(frozen=True, eq=False)
class FP32:
    """fp32 weights and products. The other precisions override what differs."""

    name: ClassVar[str] = "fp32"
    param: ClassVar[torch.dtype] = torch.float32
    compute: ClassVar[torch.dtype] = torch.float32
    reduce: ClassVar[torch.dtype] = torch.float32
    scaled: ClassVar[bool] = False
    masters: ClassVar[bool] = False
    raises: ClassVar[bool] = False
    keeps_updates: ClassVar[bool] = True
    swaps: ClassVar[bool] = False
    tf32: ClassVar[bool] = False

    options: AutocastKwargs = AutocastKwargs()

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        return None

    @property
    def gather(self) -> torch.dtype | None:
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


class TF32(FP32):
    """fp32 weights, matrix products and convolutions on TF32 Tensor Cores: 10 bits of mantissa instead of 23."""

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
