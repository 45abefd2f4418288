"""``deepspeed.ops``: its optimizers, each the library's own of the same mathematics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ... import optim
from .making import ADAM, optimizer


def _adam(
    params: Any,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    adam_w_mode: bool = True,
    **others: Any,
) -> Any:
    """Adam with decoupled weight decay, or with L2's where `adam_w_mode` is False."""
    given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adam_w_mode": adam_w_mode, **others}
    return optimizer(ADAM[0], given, params)


adam = SimpleNamespace(FusedAdam=_adam, DeepSpeedCPUAdam=_adam)
lamb = SimpleNamespace(FusedLamb=optim.LAMB)
lion = SimpleNamespace(FusedLion=optim.Lion, DeepSpeedCPULion=optim.Lion)
adagrad = SimpleNamespace(DeepSpeedCPUAdagrad=optim.Adagrad)

__all__ = ["adagrad", "adam", "lamb", "lion"]
