"""torch's SGD."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..cuda.rules import SGD as RULE
from .fused import Options, TorchsOptimizer


class SGD(TorchsOptimizer, torch.optim.SGD):
    """torch.optim.SGD.

    Args:
        ema_decay, state_dtype, stochastic_rounding: see `Options`.
        others: torch's.
    """

    rule = RULE
    torchs = torch.optim.SGD

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        fused: bool | None = None,
        ema_decay: float | None = None,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: int | bool = False,
    ) -> None:
        self.options = Options(ema_decay, state_dtype, stochastic_rounding)
        super().__init__(
            params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize, fused=fused
        )
