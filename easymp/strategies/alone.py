"""A model that a rank trains alone, as strategy "local_sgd" has it."""

from __future__ import annotations

from typing import Any

from torch import nn


class Alone(nn.Module):
    """Calls a module whose gradients no other rank waits for."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)
