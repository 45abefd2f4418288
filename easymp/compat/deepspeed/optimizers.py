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
from .config import layer
from .schedules import SCHEDULES

OURS = {word: getattr(optim, name) for word, name in NAMES.items()}
NOT_HERE = {"onebitadam": "AdamW", "zerooneadam": "AdamW", "onebitlamb": "Lamb"}
NOT_HERE |= {"muadam": "Adam", "muadamw": "AdamW", "musgd": "SGD"}
# Arguments of DeepSpeed's own Adam and Lamb that change nothing here.
WITHOUT_EFFECT = "bias_correction set_grad_none fp32_optimizer_states fused freeze_step cuda_aware".split()


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
        raise SettingError(
            f"there is no scheduler {kind!r}{nearest(kind, known) or '.'} Known: {', '.join(known)}"
        )
    takes = [name for name in inspect.signature(made).parameters if name != "optimizer"]
    _refuse_unknown(params, takes, kind)
    return lambda optimizer: made(optimizer, **params)


def _refuse_unknown(params: Iterable[str], takes: list[str], kind: str) -> None:
    for name in params:
        if name not in takes:
            raise SettingError(
                f"{kind} has no parameter {name!r}{nearest(name, takes) or '.'} It takes: {', '.join(takes)}"
            )


class FusedAdam:
    """AdamW; Adam with weight decay in the gradient for ``adam_w_mode=False``. Options in the order of `ORDER`, or by name."""

    ORDER = "lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none".split()

    def __new__(cls, params: Any, *values: Any, **options: Any) -> Any:
        return optimizer("Adam", _named(cls, values, options), params)


class DeepSpeedCPUAdam:
    """`FusedAdam` with its options in another order."""

    ORDER = "lr bias_correction betas eps weight_decay amsgrad adamw_mode".split()

    def __new__(cls, model_params: Any, *values: Any, **options: Any) -> Any:
        options = _named(cls, values, options)
        decoupled = options.pop("adamw_mode", True)
        return optimizer("Adam", {"adam_w_mode": decoupled, **options}, model_params)


def _named(cls: Any, values: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """All options by name; a TypeError, as for any function, where there are too many, or one is given twice."""
    if len(values) > len(cls.ORDER):
        raise TypeError(f"{cls.__name__} takes {len(cls.ORDER)} options by position, not {len(values)}")
    given = dict(zip(cls.ORDER, values))
    if double := given.keys() & options.keys():
        raise TypeError(f"{cls.__name__} got multiple values for {', '.join(sorted(double))}")
    return given | options
