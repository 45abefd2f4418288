"""What bf16 and fp16 share: fp32 parameters, and products in a half precision under autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import nn

from ..records import AutocastKwargs
from .autocast import autocast, under_autocast
from .fp32 import FP32


class Mixed(FP32):
    tf32: ClassVar[bool] = True  # for what autocast leaves in fp32

    @property
    def output(self) -> torch.dtype | None:
        return self.options.output_dtype

    def forward(self, model: nn.Module, device: torch.device) -> nn.Module:
        return under_autocast(model, device, self.compute, self.options)

    def casting(self, device: torch.device, options: AutocastKwargs) -> AbstractContextManager[Any]:
        return autocast(device, self.compute, options)
