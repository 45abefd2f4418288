"""DeepSpeed's optimizers and learning-rate schedules, by its classes and by the names of a configuration.

A schedule has the rates, attributes and state of DeepSpeed's, and its formulas, digit by digit; source: DeepSpeed's documentation,
"Learning Rate Schedulers". It counts its steps in `last_batch_iteration`, which is -1 before the first one and is all of its state.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ... import optim
from ...cli.config.importers import ADAMS
from ...cli.config.importers import OURS as NAMES
from ...errors import RefusedError, SettingError, nearest
from .config import layer

Rates = float | Sequence[float]


class Schedule:
    """Sets the rates of `optimizer`'s param groups from the count of steps, to those of `get_lr`."""

    optimizer: Any
    last_batch_iteration: int

    def __post_init__(self) -> None:
        self.optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        self._prepare()  # checks the arguments
        if self.last_batch_iteration == -1:
            self._set(self.get_lr())

    def _prepare(self) -> None: ...

    def get_lr(self) -> list[float]:
        """The rate of each param group at the current count."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """The rates that were set last."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Count one more, or go to the named count, and set the rates."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._set(self.get_lr())

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, int]) -> None:
        self.last_batch_iteration = sd["last_batch_iteration"]

    def _set(self, rates: list[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _each(self, value: Rates, name: str) -> list[float]:
        groups = len(self.optimizer.param_groups)
        if not isinstance(value, (list, tuple)):
            return [value] * groups  # type: ignore[list-item]
        if len(value) != groups:
            raise ValueError(f"expected {groups} values for {name}, got {len(value)}")
        return list(value)


class Warmup(Schedule):
    """Base of schedules that begin with a warm-up over `warmup_num_steps`: log(i + 1) / log(steps), or i / steps."""

    warmup_num_steps: int
    warmup_type: str

    def _prepare(self) -> None:
        steps, kind = self.warmup_num_steps, self.warmup_type
        if not isinstance(steps, int) or steps <= 0:
            raise ValueError(f"warmup_num_steps must be a positive integer, got {steps}")
        if kind not in ("log", "linear"):
            raise SettingError(f"warmup_type={kind!r} is neither 'log' nor 'linear'")
        self.warmup_num_steps = max(2, steps)
        self.inverse_log_warm_up = 1.0 / math.log(self.warmup_num_steps)

    def _rise(self) -> float | None:
        """The part of the way up; None after the warm-up."""
        i = self.last_batch_iteration
        if i >= self.warmup_num_steps:
            return None
        log = self.warmup_type == "log"
        return self.inverse_log_warm_up * math.log(i + 1) if log else i / self.warmup_num_steps


class WarmupBetween(Warmup):
    """A warm-up from `warmup_min_lr` to `warmup_max_lr`, and then a part of the way that `_after` tells."""

    warmup_min_lr: Rates
    warmup_max_lr: Rates | None

    def _prepare(self) -> None:
        super()._prepare()
        own = [group["lr"] for group in self.optimizer.param_groups]
        self.min_lrs = self._each(self.warmup_min_lr, "warmup_min_lr")
        self.max_lrs = self._each(own if self.warmup_max_lr is None else self.warmup_max_lr, "warmup_max_lr")
        self.delta_lrs = [big - small for big, small in zip(self.max_lrs, self.min_lrs)]

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return self.min_lrs
        rise = self._rise()
        share = self._after() if rise is None else rise
        return [low + delta * share for low, delta in zip(self.min_lrs, self.delta_lrs)]

    def _after(self) -> float:
        return 1.0


@dataclass(eq=False)
class WarmupLR(WarmupBetween):
    """From `warmup_min_lr` to `warmup_max_lr`, for all param groups or each (None: its own), in `warmup_num_steps`, and then constant."""

    optimizer: Any
    warmup_min_lr: Rates = 0.0
    warmup_max_lr: Rates | None = None
    warmup_num_steps: int = 1000
    warmup_type: str = "log"
    last_batch_iteration: int = -1


@dataclass(eq=False)
class WarmupDecayLR(WarmupBetween):
    """As `WarmupLR`, and then in a straight line down to `warmup_min_lr` at `total_num_steps`."""

    optimizer: Any
    total_num_steps: int
    warmup_min_lr: Rates = 0.0
    warmup_max_lr: Rates = 0.001
    warmup_num_steps: int = 1000
    warmup_type: str = "log"
    last_batch_iteration: int = -1

    def _after(self) -> float:
        left = float(self.total_num_steps - self.last_batch_iteration)
        return max(0.0, left / float(max(1.0, self.total_num_steps - self.warmup_num_steps)))


@dataclass(eq=False)
class WarmupCosineLR(Warmup):
    """From `warmup_min_ratio` of the optimizer's rates to all of them, and then down a cosine to `cos_min_ratio` at `total_num_steps`."""

    optimizer: Any
    total_num_steps: int
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 0.0001
    warmup_type: str = "log"
    last_batch_iteration: int = -1

    def _prepare(self) -> None:
        super()._prepare()
        self.org_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_lr_ratio(self) -> float:
        """The factor of the optimizer's rates at the current count."""
        if self.last_batch_iteration < 0:
            return 0.0
        rise = self._rise()
        if rise is not None:
            return self.warmup_min_ratio + rise * (1.0 - self.warmup_min_ratio)
        done = self.last_batch_iteration - self.warmup_num_steps + 1
        progress = min(1.0, done / max(1, self.total_num_steps - self.warmup_num_steps))
        height = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * height)

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]


@dataclass(eq=False)
class OneCycle(Schedule):
    """Up from `cycle_min_lr` to `cycle_max_lr` and down again, momentum the other way round, and then a decay. Source: arXiv:1803.09820.

    Each half may have stairs. In the decay rates are divided by 1 + `decay_lr_rate` × intervals of `decay_step_size` steps, and momenta
    multiplied. The momentum is betas[0], for optimizers with betas.
    """

    optimizer: Any
    cycle_min_lr: Rates
    cycle_max_lr: Rates
    decay_lr_rate: float = 0.0
    cycle_first_step_size: int = 2000
    cycle_second_step_size: int | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: int = 0
    cycle_momentum: bool = True
    cycle_min_mom: Rates = 0.8
    cycle_max_mom: Rates = 0.9
    decay_mom_rate: float = 0.0
    last_batch_iteration: int = -1

    def _prepare(self) -> None:
        first, second = self.cycle_first_step_size, self.cycle_second_step_size
        second = first if second is None else second
        if first <= 0 or second < 0:
            raise ValueError(f"cycle_first_step_size={first}, cycle_second_step_size={second}: negative or 0")
        stairs = self.cycle_first_stair_count, self.cycle_second_stair_count
        self.stairs = stairs[0], stairs[0] if stairs[1] is None else stairs[1]
        self.sizes = float(first), float(second)
        self.total_size = sum(self.sizes)
        self.step_ratio = self.sizes[0] / self.total_size
        self.min_lrs = self._each(self.cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._each(self.cycle_max_lr, "cycle_max_lr")
        self.cycle_momentum = self.cycle_momentum and "betas" in self.optimizer.defaults
        self.min_moms = self._each(self.cycle_min_mom, "cycle_min_mom")
        self.max_moms = self._each(self.cycle_max_mom, "cycle_max_mom")

    def _set(self, rates: list[float]) -> None:
        super()._set(rates)
        begins = self.last_batch_iteration == -1  # at the smallest momentum, as in DeepSpeed
        momenta = [(low, 0.99) for low in self.min_moms] if begins else self.get_mom()
        for group, betas in zip(self.optimizer.param_groups, (momenta or ()) if self.cycle_momentum else ()):
            group["betas"] = betas

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < self.total_size:
            height = self._height()
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs)]
        return [low / (1 + self.decay_lr_rate * self._intervals()) for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each param group at the current count; None where momentum stays as it is."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < self.total_size:
            height = self._height()
            return [(high - (high - low) * height, 0.99) for low, high in zip(self.min_moms, self.max_moms)]
        return [(high * (1 + self.decay_mom_rate * self._intervals()), 0.99) for high in self.max_moms]

    def _intervals(self) -> float:
        after = self.last_batch_iteration - self.total_size + 1
        return after / self.decay_step_size if self.decay_step_size else 0.0

    def _height(self) -> float:
        """0 at the bottom of the cycle, 1 at its top."""
        i, (first, second) = self.last_batch_iteration + 1, self.sizes
        x = 1.0 + i / self.total_size - math.floor(1 + i / self.total_size)
        up = x <= self.step_ratio
        stairs = self.stairs[not up]
        if not stairs:
            return x / self.step_ratio if up else (x - 1) / (self.step_ratio - 1)
        at = i % self.total_size  # whole steps: a share could miss a stair by the last bit
        part = at * stairs / first if at <= first else (self.total_size - at) * stairs / second
        return math.floor(part) / stairs


@dataclass(eq=False)
class LRRangeTest(Schedule):
    """Rates that rise by rate × `lr_range_test_min_lr` in each `lr_range_test_step_size` steps. Source: arXiv:1803.09820."""

    optimizer: Any
    lr_range_test_min_lr: Rates = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False
    last_batch_iteration: int = -1

    def _prepare(self) -> None:
        size = self.lr_range_test_step_size
        if not isinstance(size, int) or size <= 0:
            raise ValueError(f"lr_range_test_step_size must be a positive integer, got {size}")
        self.min_lr = self._each(self.lr_range_test_min_lr, "lr_range_test_min_lr")

    def get_lr(self) -> list[float]:
        intervals = float(self.last_batch_iteration + 1) / self.lr_range_test_step_size
        intervals = math.floor(intervals) if self.lr_range_test_staircase else intervals
        return [rate * (1 + self.lr_range_test_step_rate * intervals) for rate in self.min_lr]


SCHEDULES = {kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)}


# -- optimizers, and both by name ----------------------------------------------------------------------------------------

OURS = {word: getattr(optim, name) for word, name in NAMES.items()}
NOT_HERE = dict.fromkeys(("onebitadam", "zerooneadam", "muadamw", "muon"), "AdamW")
NOT_HERE |= {"onebitlamb": "Lamb", "muadam": "Adam", "musgd": "SGD"}
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
        raise SettingError("optimizer.params.max_grad_norm: write gradient_clipping beside optimizer")
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


class Adams(type):
    """The type of what makes Adam or AdamW: what it makes is an instance of it."""

    def __instancecheck__(cls, found: Any) -> bool:
        return isinstance(found, torch.optim.Adam)


# fmt: off
class FusedAdam(metaclass=Adams):
    """AdamW; Adam with weight decay in the gradient for ``adam_w_mode=False``."""

    def __new__(
        cls, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: Betas = (0.9, 0.999), eps: float = 1e-8,
        adam_w_mode: bool = True, weight_decay: float = 0.0, amsgrad: bool = False, set_grad_none: bool = True,
    ) -> Any:
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        return optimizer("Adam", {**given, "adam_w_mode": adam_w_mode, "bias_correction": bias_correction}, params)


class DeepSpeedCPUAdam(metaclass=Adams):
    """`FusedAdam` with its options in another order."""

    def __new__(
        cls, model_params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: Betas = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, amsgrad: bool = False, adamw_mode: bool = True, fp32_optimizer_states: bool = True,
    ) -> Any:
        return FusedAdam(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)
