"""Optimizers and schedulers by the names of a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ... import optim
from ...cli.config.deepspeed import ADAMS
from ...cli.config.deepspeed import OURS as NAMES
from ...errors import SettingError, nearest
from .layer import layer
from .schedules import SCHEDULES

ADAM = (*ADAMS, "adamw")
OURS = {word: getattr(optim, name) for word, name in NAMES.items()}
NOT_HERE = {"onebitadam": "AdamW", "zerooneadam": "AdamW", "onebitlamb": "Lamb"}
NOT_HERE |= {"muadam": "Adam", "muadamw": "AdamW", "musgd": "SGD"}
# Of DeepSpeed's own Adams and Lamb, and what they change here: nothing.
WITHOUT_EFFECT = tuple(
    "bias_correction set_grad_none fp32_optimizer_states fused freeze_step cuda_aware".split()
)


def optimizer(kind: str, params: dict[str, Any], parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """The optimizer `kind` of DeepSpeed's, torch.optim's or easymp.optim's names, in any spelling of capitals.

    Raises:
        SettingError: no such optimizer, or no such parameter of it.
    """
    params = {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}
    known = {
        name.lower(): getattr(torch.optim, name)
        for name in dir(torch.optim)
        if inspect.isclass(getattr(torch.optim, name))
    }
    word = kind.lower()
    if word in NOT_HERE:
        raise SettingError(f"optimizer {kind!r} is not part of easymp.compat: use {NOT_HERE[word]!r}")
    made: Any
    if word not in OURS and params.pop("max_grad_norm", None):
        raise SettingError(
            "optimizer.params.max_grad_norm is not the optimizer's: write gradient_clipping beside optimizer"
        )
    if word in ADAM:
        decoupled = params.pop("adam_w_mode", True) or word == "adamw"
        made = torch.optim.AdamW if decoupled else torch.optim.Adam
        if not params.pop("torch_adam", False):
            params.setdefault("weight_decay", 0.0)  # of DeepSpeed's classes
    else:
        made = OURS.get(word) or known.get(word)
    if made is None or made is torch.optim.Optimizer:
        raise SettingError(
            f"there is no optimizer {kind!r}{nearest(kind, ['Lamb', 'Lion', *(k.__name__ for k in known.values())]) or '.'}"
        )
    takes = inspect.signature(made).parameters
    ignored = {
        f"optimizer.params.{n}": "it makes no difference here"
        for n in WITHOUT_EFFECT
        if n in params and n not in takes
    }
    layer.ignore(ignored)
    params = {name: value for name, value in params.items() if f"optimizer.params.{name}" not in ignored}
    for name in params:
        if name not in takes or name == "params":
            raise SettingError(
                f"{name!r} is no parameter of {made.__name__}{nearest(name, takes) or '.'} It takes: {', '.join(takes)}"
            )
    return made(parameters, **params)


def scheduler(kind: str, params: dict[str, Any]) -> Callable[[torch.optim.Optimizer], Any]:
    """A function that makes the schedule `kind`, one of DeepSpeed's or torch's names, for an optimizer.

    Raises:
        SettingError: no such schedule, or no such parameter of it.
    """
    made = SCHEDULES.get(kind) or getattr(torch.optim.lr_scheduler, kind, None)
    if not inspect.isclass(made):
        known = [*SCHEDULES, *(name for name in dir(torch.optim.lr_scheduler) if name.endswith("LR"))]
        raise SettingError(
            f"there is no scheduler {kind!r}{nearest(kind, known) or '.'} Known: {', '.join(known)}"
        )
    takes = [name for name in inspect.signature(made).parameters if name != "optimizer"]
    for name in params:
        if name not in takes:
            raise SettingError(
                f"{name!r} is no parameter of {kind}{nearest(name, takes) or '.'} It takes: {', '.join(takes)}"
            )
    return lambda optimizer: made(optimizer, **params)


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
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        return optimizer(ADAM[0], {**given, "adam_w_mode": adam_w_mode, **others}, params)


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
        decoupled = others.pop("adam_w_mode", adamw_mode)
        return FusedAdam(model_params, lr, True, betas, eps, decoupled, weight_decay, amsgrad, **others)
