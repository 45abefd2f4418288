"""Frames around a model: modules that call it, and do nothing else."""

from __future__ import annotations

from typing import Any

from torch import nn


class Framed(nn.Module):
    """Calls a module of torch's own (a bare nn.Sequential), whose code torch.compile passes over when DDP calls it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)
