"""``deepspeed.ops.adam``: what is made is torch's AdamW or Adam, for which the Accelerator takes the fastest implementation."""

from __future__ import annotations

from typing import Any

from ..making import ADAM, optimizer


class FusedAdam:
    """Adam with decoupled weight decay, or with L2's where `adam_w_mode` is False."""

    def __new__(
        cls,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **others: Any,
    ) -> Any:
        given = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "adam_w_mode": adam_w_mode,
        }
        return optimizer(ADAM[0], {**given, **others}, params)


class DeepSpeedCPUAdam:
    """The same; DeepSpeed's own has its parameters in another order."""

    def __new__(
        cls,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        **others: Any,
    ) -> Any:
        return FusedAdam(
            model_params,
            lr,
            True,
            betas,
            eps,
            others.pop("adam_w_mode", adamw_mode),
            weight_decay,
            amsgrad,
            **others,
        )
