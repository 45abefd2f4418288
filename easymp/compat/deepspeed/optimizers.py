"""DeepSpeed's optimizers and learning-rate schedules, by its classes and by the names of a configuration.

A schedule has DeepSpeed's formulas, digit by digit; source: its documentation, "Learning Rate Schedulers".
"""

from __future__ import annotations

import inspect
import math
from abc import ABC
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ... import optim
from ...errors import RefusedError, SettingError, nearest
from ..layer import by_name
from .config import layer

Rates = float | Sequence[float]  # of all param groups, or of each

# -- schedules


class Schedule(LRScheduler):
    """Base of the schedules. Its state is the count alone, so that a resumed run takes other settings."""

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        rates = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, rates):
            group.setdefault("initial_lr", rate)
        super().__init__(optimizer, last_batch_iteration)
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate if last_batch_iteration != -1 else group["lr"]  # a later start waits for its first step

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next iteration, or to `last_batch_iteration`."""
        if last_batch_iteration is not None:
            self.last_epoch = last_batch_iteration
        super().step()

    last_batch_iteration = property(lambda self: self.last_epoch - 1)

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.last_epoch = state_dict["last_batch_iteration"] + 1


def _per_group(optimizer: Any, value: Rates, name: str) -> list[float]:
    groups = len(optimizer.param_groups)
    if not isinstance(value, (list, tuple)):
        return [value] * groups  # type: ignore[list-item]  # a number
    if len(value) != groups:
        raise ValueError(f"expected {groups} values for {name}, got {len(value)}")
    return list(value)


class WarmupLR(Schedule):
    """From `warmup_min_lr` to `warmup_max_lr` (None: the optimizer's rates) in `warmup_num_steps`, then constant."""

    def __init__(
        self, optimizer: Any, warmup_min_lr: Rates = 0.0, warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000, warmup_type: str = "log", last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        if not isinstance(warmup_num_steps, int) or warmup_num_steps <= 0:
            raise ValueError(f"warmup_num_steps must be a positive integer, got {warmup_num_steps}")
        if warmup_type not in ("log", "linear"):
            raise SettingError(f"warmup_type={warmup_type!r} is neither 'log' nor 'linear'")
        self.warmup_num_steps, self.warmup_type = max(2, warmup_num_steps), warmup_type
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = _per_group(optimizer, warmup_min_lr, "warmup_min_lr")
        self.max_lrs = _per_group(optimizer, rates if warmup_max_lr is None else warmup_max_lr, "warmup_max_lr")
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[Any]:
        share = self._share()
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs)]

    def _share(self) -> float:
        """0 at `min_lrs`, 1 at `max_lrs`."""
        i, steps = max(0, self.last_batch_iteration), self.warmup_num_steps
        if i >= steps:
            return self._share_after_warmup()
        return 1.0 / math.log(steps) * math.log(i + 1) if self.warmup_type == "log" else i / steps

    def _share_after_warmup(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """As `WarmupLR`, and then in a straight line down to `warmup_min_lr` at `total_num_steps`."""

    def __init__(
        self, optimizer: Any, total_num_steps: int, warmup_min_lr: Rates = 0.0, warmup_max_lr: Rates = 0.001,
        warmup_num_steps: int = 1000, warmup_type: str = "log", last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _share_after_warmup(self) -> float:
        remaining = float(self.total_num_steps - self.last_batch_iteration)
        return max(0.0, remaining / float(max(1.0, self.total_num_steps - self.warmup_num_steps)))


class WarmupCosineLR(WarmupLR):
    """From `warmup_min_ratio` of the optimizer's rates to all of them, and down a cosine to `cos_min_ratio`."""

    def __init__(
        self, optimizer: Any, total_num_steps: int, warmup_min_ratio: float = 0.0, warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001, warmup_type: str = "log", last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        super().__init__(optimizer, 0.0, None, warmup_num_steps, warmup_type, last_batch_iteration)

    def _share_after_warmup(self) -> float:
        steps = self.last_batch_iteration - self.warmup_num_steps + 1
        progress = min(1.0, steps / max(1, self.total_num_steps - self.warmup_num_steps))
        height = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * height)

    def get_lr(self) -> list[Any]:
        ratio = self._share()
        if self.last_batch_iteration < self.warmup_num_steps:
            ratio = self.warmup_min_ratio + ratio * (1.0 - self.warmup_min_ratio)
        return [rate * ratio * (self.last_batch_iteration >= 0) for rate in self.base_lrs]


class OneCycle(Schedule):
    """Up from `cycle_min_lr` to `cycle_max_lr` and down, betas[0] the other way, and a decay; arXiv:1803.09820."""

    def __init__(
        self, optimizer: Any, cycle_min_lr: Rates, cycle_max_lr: Rates, decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000, cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0, cycle_second_stair_count: int | None = None, decay_step_size: int = 0,
        cycle_momentum: bool = True, cycle_min_mom: Rates = 0.8, cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0, last_batch_iteration: int = -1,
    ) -> None:  # fmt: skip
        first = cycle_first_step_size
        second = first if cycle_second_step_size is None else cycle_second_step_size
        if first <= 0 or second < 0:
            raise ValueError(f"cycle_first_step_size={first}, cycle_second_step_size={second}: negative or 0")
        self.first_size, self.second_size = first, second
        second_stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.stairs = cycle_first_stair_count, second_stairs
        self.decay_step_size, self.decay_lr_rate, self.decay_mom_rate = decay_step_size, decay_lr_rate, decay_mom_rate
        self.min_lrs = _per_group(optimizer, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = _per_group(optimizer, cycle_max_lr, "cycle_max_lr")
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        self.min_moms = _per_group(optimizer, cycle_min_mom, "cycle_min_mom")
        self.max_moms = _per_group(optimizer, cycle_max_mom, "cycle_max_mom")
        super().__init__(optimizer, last_batch_iteration)

    def step(self, batch_iteration: int | None = None) -> None:
        """Go to the next iteration, or to `batch_iteration`."""
        super().step(batch_iteration)
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or ()):
            group["betas"] = betas

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each param group; None where no momentum is cycled."""
        if not self.cycle_momentum:
            return None
        height, decay = self._position()
        height = 1.0 if self.last_epoch == 0 else height  # at the smallest momentum, as in DeepSpeed
        momenta = [high - (high - low) * height for low, high in zip(self.min_moms, self.max_moms)]
        return [(momentum * (1 + self.decay_mom_rate * decay), 0.99) for momentum in momenta]

    def get_lr(self) -> list[Any]:
        height, decay = self._position()
        rates = [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs)]
        return [rate / (1 + self.decay_lr_rate * decay) for rate in rates]

    def _position(self) -> tuple[float, float]:
        """Height in the cycle, 0 at its bottom and 1 at its top, and intervals of the decay after it."""
        i, total = self.last_epoch, self.first_size + self.second_size
        if i > total:
            return 0.0, (i - total) / self.decay_step_size if self.decay_step_size else 0.0
        x, top = i / total - i // total, self.first_size / total
        stairs = self.stairs[0 if x <= top else 1]
        if not stairs:
            return (x / top if x <= top else (x - 1) / (top - 1)), 0.0
        step = i % total  # whole steps: a share could miss a stair by the last bit
        side = self.first_size if step <= self.first_size else self.second_size
        stair = (step if step <= self.first_size else total - step) * stairs / side
        return math.floor(stair) / stairs, 0.0


SCHEDULES = by_name(WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle)


def scheduler(kind: str, params: dict[str, Any]) -> Callable[[torch.optim.Optimizer], Any]:
    """A function that makes the schedule `kind`, of DeepSpeed or torch, for an optimizer."""
    if kind == "LRRangeTest":
        raise SettingError("scheduler 'LRRangeTest' is not part of easymp.compat: use torch's LambdaLR")
    schedule: Any = SCHEDULES.get(kind) or getattr(torch.optim.lr_scheduler, kind, None)
    if not isinstance(schedule, type):
        names = [*SCHEDULES, *(name for name in dir(torch.optim.lr_scheduler) if name.endswith("LR"))]
        raise SettingError(f"there is no scheduler {kind!r}{nearest(kind, names) or '.'} Known: {names}")
    _refuse_unknown(params, [name for name in inspect.signature(schedule).parameters if name != "optimizer"], kind)
    return lambda optimizer: schedule(optimizer, **params)


# -- optimizers

OURS = {"lamb": "LAMB", "fusedlamb": "LAMB", "lion": "Lion", "fusedlion": "Lion", "cpulion": "Lion"}
ADAMS = ("adam", "fusedadam", "cpuadam", "deepspeedcpuadam")  # AdamW, unless adam_w_mode is false
REPLACEMENTS = dict.fromkeys(("onebitadam", "zerooneadam", "muadamw", "muon"), "AdamW")
REPLACEMENTS |= {"onebitlamb": "Lamb", "muadam": "Adam", "musgd": "SGD"}
WITHOUT_DIFFERENCE = ("set_grad_none", "fp32_optimizer_states", "fused")  # arguments of DeepSpeed's Adam and Lamb


def optimizer(kind: str, params: dict[str, Any], parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """The optimizer `kind`: a name of DeepSpeed, torch.optim or easymp.optim, in any capitals."""
    params = {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}
    lower_name = kind.lower()
    if lower_name in REPLACEMENTS:
        raise SettingError(f"optimizer {kind!r} is not part of easymp.compat: use {REPLACEMENTS[lower_name]!r}")
    if lower_name not in OURS and params.pop("max_grad_norm", None):
        raise SettingError("optimizer.params.max_grad_norm: write gradient_clipping beside optimizer")
    classes: dict[str, Any] = {name.lower(): kind for name, kind in vars(torch.optim).items() if inspect.isclass(kind)}
    del classes["optimizer"]
    classes |= {name: getattr(optim, attribute) for name, attribute in OURS.items()}
    if lower_name in (*ADAMS, "adamw"):
        if not params.pop("bias_correction", True):
            raise RefusedError("bias_correction=False is not honoured: torch's Adam always corrects")
        decoupled = params.pop("adam_w_mode", True) or lower_name == "adamw"
        classes[lower_name] = torch.optim.AdamW if decoupled else torch.optim.Adam
        if not params.pop("torch_adam", False):
            params.setdefault("weight_decay", 0.0)  # the default of DeepSpeed's classes
    if lower_name not in classes:
        names = ["Lamb", "Lion", *(kind.__name__ for kind in classes.values())]
        raise SettingError(f"there is no optimizer {kind!r}{nearest(kind, names) or '.'}")
    signature = inspect.signature(classes[lower_name]).parameters
    params = {name: value for name, value in params.items() if name in signature or name not in WITHOUT_DIFFERENCE}
    _refuse_unknown(params, [name for name in signature if name != "params"], classes[lower_name].__name__)
    made: torch.optim.Optimizer = classes[lower_name](parameters, **params)
    return made


def _refuse_unknown(params: Iterable[str], names: list[str], kind: str) -> None:
    for name in params:
        if name not in names:
            hint = nearest(name, names) or "."
            raise SettingError(f"{kind} has no parameter {name!r}{hint} It takes: {', '.join(names)}")


class FusedAdam(ABC):  # noqa: B024 (for the register below)
    """Makes torch's AdamW; Adam with weight decay in the gradient for ``adam_w_mode=False``."""

    def __new__(
        cls, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, adam_w_mode: bool = True, weight_decay: float = 0.0, amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> Any:  # fmt: skip
        if not set_grad_none:
            layer.ignore({"FusedAdam(set_grad_none=False)": "zero_grad() of the engine sets gradients to None"})
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        return optimizer("Adam", {**options, "bias_correction": bias_correction, "adam_w_mode": adam_w_mode}, params)


class DeepSpeedCPUAdam(ABC):  # noqa: B024 (likewise)
    """`FusedAdam` with other names and another order of the arguments."""

    def __new__(
        cls, model_params: Any, lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0, amsgrad: bool = False,
        adamw_mode: bool = True, fp32_optimizer_states: bool = True,
    ) -> Any:  # fmt: skip
        if not fp32_optimizer_states:
            layer.ignore({"DeepSpeedCPUAdam(fp32_optimizer_states=False)": "states have the weights' type"})
        return FusedAdam(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)


for adam in (FusedAdam, DeepSpeedCPUAdam):
    adam.register(torch.optim.Adam)  # AdamW among them: what these classes make counts as their instances
