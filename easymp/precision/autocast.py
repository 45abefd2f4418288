"""A model under autocast, with the type of its outputs settled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..records import AutocastKwargs
from ..tree import map_leaves


class Autocast(nn.Module):
    """Calls `module` under ``torch.autocast`` and casts floating-point outputs to ``options.output_dtype``.

    Autocast lies inside this module's forward, so that whatever wraps it (DDP, torch.compile) sees one function.
    """

    def __init__(self, module: nn.Module, device: torch.device, compute: torch.dtype, options: AutocastKwargs) -> None:
        super().__init__()
        self.module = module
        self.device_type = device.type
        self.compute = compute
        self.options = options

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, self.compute, True, self.options.cache_enabled):
            outputs = self.module(*args, **kwargs)
        wanted = self.options.output_dtype
        if wanted is None:
            return outputs
        if type(outputs) is Tensor:
            return outputs.to(wanted) if outputs.is_floating_point() else outputs
        return map_leaves(
            lambda leaf: leaf.to(wanted) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, outputs
        )


def under_autocast(module: nn.Module, device: torch.device, compute: torch.dtype, options: AutocastKwargs) -> nn.Module:
    """`module` under autocast, or `module` itself where the caller turned autocast off."""
    return Autocast(module, device, compute, options) if options.enabled else module
