"""Optimizers and schedulers by the names of a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ... import optim
from ...cli.config.deepspeed import ADAMS
from ...cli.config.deepspeed import OURS as NAMES
from ...errors import RefusedError, SettingError, nearest
from .config import layer
from .schedules import SCHEDULES

OURS = {word: getattr(optim, name) for word, name in NAMES.items()}
NOT_HERE = {"onebitadam": "AdamW", "zerooneadam": "AdamW", "onebitlamb": "Lamb"}
NOT_HERE |= {"muadam": "Adam", "muadamw": "AdamW", "musgd": "SGD"}
NOT_HERE |= {"muon": "AdamW"}
# Arguments of DeepSpeed's own Adam and Lamb that change nothing here.
WITHOUT_EFFECT = "set_grad_none fp32_optimizer_states fused freeze_step cuda_aware".split()
Betas = tuple[float, float]


def optimizer(kind: str, params: dict[str, Any], parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """The optimizer `kind`: a name of DeepSpeed, torch.optim or easymp.optim, in any capitals."""
    params = {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}
    known = {name.lower(): found for name, found in vars(torch.optim).items() if inspect.isclass(found)}
    del known["optimizer"]
    word = kind.lower()
    if word in NOT_HERE:
        raise SettingError(f"optimizer {kind!r} is not part of easymp.compat: use {NOT_HERE[word]!r}")
    if word not in OURS and params.pop("max_grad_norm", None):
        raise SettingError(
            "optimizer.params.max_grad_norm: clipping is not the optimizer's; write gradient_clipping beside optimizer"
        )
    if word in (*ADAMS, "adamw") and not params.pop("bias_correction", True):
        raise RefusedError("bias_correction=False is not honoured: torch's Adam always corrects")
    made: Any = OURS.get(word) or known.get(word)
    if word in ADAMS or word == "adamw":
        decoupled = params.pop("adam_w_mode", True) or word == "adamw"
        made = torch.optim.AdamW if decoupled else torch.optim.Adam
        if not params.pop("torch_adam", False):
            params.setdefault("weight_decay", 0.0)  # the default of DeepSpeed's classes
    if made is None:
        names = ["Lamb", "Lion", *(found.__name__ for found in known.values())]
        raise SettingError(f"there is no optimizer {kind!r}{nearest(kind, names) or '.'}")
    takes = [name for name in inspect.signature(made).parameters if name != "params"]
    ignored = [name for name in WITHOUT_EFFECT if name in params and name not in takes]
    layer.ignore({f"optimizer.params.{name}": "it makes no difference here" for name in ignored})
    params = {name: value for name, value in params.items() if name not in ignored}
    _refuse_unknown(params, takes, made.__name__)
    return made(parameters, **params)


def scheduler(kind: str, params: dict[str, Any]) -> Callable[[torch.optim.Optimizer], Any]:
    """A function that makes the schedule `kind`, of DeepSpeed or torch, for an optimizer."""
    made = SCHEDULES.get(kind) or getattr(torch.optim.lr_scheduler, kind, None)
    if not inspect.isclass(made):
        known = [*SCHEDULES, *(name for name in dir(torch.optim.lr_scheduler) if name.endswith("LR"))]
        raise SettingError(f"there is no scheduler {kind!r}{nearest(kind, known) or '.'} Known: {known}")
    takes = [name for name in inspect.signature(made).parameters if name != "optimizer"]
    _refuse_unknown(params, takes, kind)
    return lambda optimizer: made(optimizer, **params)


def _refuse_unknown(params: Iterable[str], takes: list[str], kind: str) -> None:
    for name in params:
        if name not in takes:
            near = nearest(name, takes) or "."
            raise SettingError(f"{kind} has no parameter {name!r}{near} It takes: {', '.join(takes)}")


# fmt: off
class FusedAdam:
    """AdamW; Adam with weight decay in the gradient for ``adam_w_mode=False``."""

    def __new__(
        cls, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: Betas = (0.9, 0.999), eps: float = 1e-8,
        adam_w_mode: bool = True, weight_decay: float = 0.0, amsgrad: bool = False, set_grad_none: bool = True,
    ) -> Any:
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        return optimizer("Adam", {**given, "adam_w_mode": adam_w_mode, "bias_correction": bias_correction}, params)


class DeepSpeedCPUAdam:
    """`FusedAdam` with its options in another order."""

    def __new__(
        cls, model_params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: Betas = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, amsgrad: bool = False, adamw_mode: bool = True, fp32_optimizer_states: bool = True,
    ) -> Any:
        return FusedAdam(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)
