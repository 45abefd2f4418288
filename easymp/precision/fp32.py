"""fp32: nothing is cast. torch's own TF32 flags stand as the user left them."""

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
    """Everything as it is."""

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
