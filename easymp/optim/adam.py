"""torch's Adam and AdamW."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..cuda.rules import ADAM
from .fused import Options, TorchsOptimizer


class Adam(TorchsOptimizer, torch.optim.Adam):
    """torch.optim.Adam.

    Args:
        ema_decay, state_dtype, stochastic_rounding: see `Options`.
        others: torch's.
    """

    rule = ADAM
    torchs = torch.optim.Adam

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        fused: bool | None = None,
        ema_decay: float | None = None,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: int | bool = False,
    ) -> None:
        self.options = Options(ema_decay, state_dtype, stochastic_rounding)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, fused=fused)


class AdamW(TorchsOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW.

    Args:
        ema_decay, state_dtype, stochastic_rounding: see `Options`.
        others: torch's.
    """

    rule = ADAM
    torchs = torch.optim.AdamW

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        fused: bool | None = None,
        ema_decay: float | None = None,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: int | bool = False,
    ) -> None:
        self.options = Options(ema_decay, state_dtype, stochastic_rounding)
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, fused=fused)
