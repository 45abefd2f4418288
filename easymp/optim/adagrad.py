"""torch's Adagrad."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..cuda.rules import ADAGRAD
from .fused import Options, TorchsOptimizer


class Adagrad(TorchsOptimizer, torch.optim.Adagrad):
    """torch.optim.Adagrad.

    Args:
        ema_decay, state_dtype, stochastic_rounding: see `Options`.
        others: torch's.
    """

    rule = ADAGRAD
    torchs = torch.optim.Adagrad

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        fused: bool | None = None,
        ema_decay: float | None = None,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: int | bool = False,
    ) -> None:
        self.options = Options(ema_decay, state_dtype, stochastic_rounding)
        super().__init__(
            params, lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize=maximize, fused=fused
        )
