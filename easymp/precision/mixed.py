"""What bf16 and fp16 share: fp32 parameters, and products in a half precision under autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import nn

from ..options import AutocastKwargs
from .autocast import autocast, under_autocast
from .fp32 import FP32

LOW = (torch.float16, torch.bfloat16)


class Mixed(FP32):
    raises: ClassVar[bool] = True
    tf32: ClassVar[bool] = True  # for what autocast leaves in fp32

    @property
    def gather(self) -> torch.dtype | None:
        return self.compute if self.options.enabled else None

    @property
    def output(self) -> torch.dtype | None:
        return self.options.output_dtype

    def forward(self, model: nn.Module, device: torch.device) -> nn.Module:
        return under_autocast(model, device, self.compute, self.options)

    def casting(self, device: torch.device, options: AutocastKwargs) -> AbstractContextManager[Any]:
        return autocast(device, self.compute, options)


def raise_weights(model: nn.Module) -> list[tuple[nn.Parameter, torch.dtype]]:
    """Raise trainable bf16 and fp16 parameters of `model` to fp32, in place. Frozen ones keep their dtype.

    They stay the objects that optimizers and tied modules hold. Parameters on the meta device are raised there. Buffers are raised, too
    (a batch-norm takes weights and statistics of one dtype), but for those of a module whose own parameters are frozen.

    Returns:
        The raised parameters, each with the dtype that it had.
    """
    raised = [(p, p.dtype) for p in model.parameters() if p.requires_grad and p.dtype in LOW]
    chosen = {id(t) for p, _ in raised for t in (p, p.grad) if t is not None}
    for module in model.modules() if raised else ():
        own = [p for p in module._parameters.values() if p is not None]
        if not own or any(id(p) in chosen for p in own):
            chosen.update(id(b) for b in module._buffers.values() if b is not None and b.dtype in LOW)
        module._apply(lambda t: t.float() if id(t) in chosen else t, recurse=False)
    return raised
