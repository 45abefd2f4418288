"""DeepSpeed's learning-rate schedules, as torch schedulers.

`i` counts the calls of `step` from 0; before the first call it is -1. Formulas are DeepSpeed's (its documentation, "Learning Rate
Schedulers"): a warm-up over n steps follows log(i + 1) / log(n), or i / n.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...errors import EasympWarning, SettingError


class Schedule(LRScheduler):
    """Rates as a function of `last_batch_iteration`, DeepSpeed's count of steps; -1 before the first."""

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int = -1) -> None:
        optimizer = _inner(optimizer)
        if last_batch_iteration >= 0:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        super().__init__(optimizer, last_batch_iteration)

    @property
    def last_batch_iteration(self) -> int:
        return self.last_epoch - 1

    def rates(self, i: int) -> list[float]:
        raise NotImplementedError

    def get_lr(self) -> list[float]:
        return self.rates(self.last_batch_iteration)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the next rate, or the rate of the named step."""
        if last_batch_iteration is not None:
            self.last_epoch = last_batch_iteration
        super().step()


class WarmupLR(Schedule):
    """From `warmup_min_lr` to `warmup_max_lr` in `warmup_num_steps`, and then constant.

    Args:
        warmup_max_lr: None takes the rate of the optimizer's first param group.
        warmup_type: "log" or "linear".
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        rates = [group["lr"] for group in _inner(optimizer).param_groups]
        if warmup_max_lr is None and len(set(rates)) > 1:
            warnings.warn(
                f"WarmupLR without warmup_max_lr gives all param groups the first group's rate, {rates[0]:g}, as DeepSpeed's does; the "
                f"groups have {', '.join(f'{rate:g}' for rate in rates)}. Pass warmup_max_lr={rates} to keep them",
                EasympWarning,
                stacklevel=2,
            )
        top = rates[0] if warmup_max_lr is None else warmup_max_lr
        self.min_lrs = _each(warmup_min_lr, len(rates), "warmup_min_lr")
        self.max_lrs = _each(top, len(rates), "warmup_max_lr")
        self.warmup_num_steps, self.warmup_type = _warmup(warmup_num_steps, warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, i: int) -> list[float]:
        rises = i < self.warmup_num_steps
        share = (
            0.0 if i < 0 else _rise(i, self.warmup_num_steps, self.warmup_type) if rises else self.after(i)
        )
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs)]

    def after(self, i: int) -> float:
        """Part of the way from the smallest rate to the largest, after the warm-up."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """As `WarmupLR`, and then in a straight line down to `warmup_min_lr` at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration
        )

    def after(self, i: int) -> float:
        return max(0.0, (self.total_num_steps - i) / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(Schedule):
    """From `warmup_min_ratio` of the optimizer's rates to all of them, and then down a cosine to `cos_min_ratio` at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.warmup_num_steps, self.warmup_type = _warmup(warmup_num_steps, warmup_type)
        self.org_lrs = [float(group["lr"]) for group in _inner(optimizer).param_groups]
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, i: int) -> list[float]:
        return [rate * self.ratio(i) for rate in self.org_lrs]

    def ratio(self, i: int) -> float:
        if i < 0:
            return 0.0
        if i < self.warmup_num_steps:
            rise = _rise(i, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * rise
        steps = max(1, self.total_num_steps - self.warmup_num_steps)
        done = min(1.0, (i - self.warmup_num_steps + 1) / steps)
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2)


class OneCycle(Schedule):
    """Up from `cycle_min_lr` to `cycle_max_lr` and down again, momentum the other way round, and then a decay. Source: arXiv:1803.09820.

    Args:
        cycle_first_step_size, cycle_second_step_size: steps up, and down (None: as many).
        cycle_first_stair_count, cycle_second_stair_count: stairs of each half; 0 for a slope.
        decay_step_size: steps in which the decay's factor grows by its rate; 0 for no decay.
        decay_lr_rate, decay_mom_rate: rates are divided by 1 + rate × intervals, momenta are multiplied.
        cycle_momentum: betas[0] goes from `cycle_max_mom` to `cycle_min_mom` and back, for optimizers with betas.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: float,
        cycle_max_lr: float,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.sizes = float(cycle_first_step_size), float(second)
        self.stairs = cycle_first_stair_count, stairs
        self.total_size = sum(self.sizes)
        self.low, self.high = float(cycle_min_lr), float(cycle_max_lr)
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.decay_step_size = decay_step_size
        self.cycle_momentum = cycle_momentum and "betas" in _inner(optimizer).defaults
        self.low_mom, self.high_mom = float(cycle_min_mom), float(cycle_max_mom)
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, i: int) -> list[float]:
        if i < self.total_size:
            rate = self.low + (self.high - self.low) * self.height(i)
        else:
            rate = self.low / (1 + self.decay_lr_rate * self._intervals(i))
        if self.cycle_momentum:
            for group in self.optimizer.param_groups:
                group["betas"] = (self.momentum(i), 0.99)
        return [rate] * len(self.optimizer.param_groups)

    def momentum(self, i: int) -> float:
        if i < 0:
            return self.low_mom  # as DeepSpeed begins
        if i < self.total_size:
            return self.high_mom - (self.high_mom - self.low_mom) * self.height(i)
        return self.high_mom * (1 + self.decay_mom_rate * self._intervals(i))

    def _intervals(self, i: int) -> float:
        return (i - self.total_size + 1) / self.decay_step_size if self.decay_step_size else 0.0

    def height(self, i: int) -> float:
        """0 at the bottom of the cycle, 1 at its top."""
        at = (i + 1) % self.total_size
        up = at <= self.sizes[0]
        share = at / self.sizes[0] if up else (self.total_size - at) / self.sizes[1]
        stairs = self.stairs[0] if up else self.stairs[1]
        return math.floor(share * stairs + 1e-9) / stairs if stairs else share


class LRRangeTest(Schedule):
    """Rates that rise by `lr_range_test_step_rate` × `lr_range_test_min_lr` in each `lr_range_test_step_size` steps.

    Used to find the largest rate at which training converges. Source: arXiv:1803.09820.

    Args:
        lr_range_test_staircase: rise at once after each interval.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        groups = len(_inner(optimizer).param_groups)
        self.min_lr = _each(lr_range_test_min_lr, groups, "lr_range_test_min_lr")
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, i: int) -> list[float]:
        intervals = (i + 1) / self.step_size
        factor = 1 + self.step_rate * (math.floor(intervals) if self.staircase else intervals)
        return [rate * factor for rate in self.min_lr]


def _inner(optimizer: Any) -> Optimizer:
    """The optimizer inside of a wrapper."""
    found: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found


def _warmup(steps: Any, kind: str) -> tuple[int, str]:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps <= 0:
        raise ValueError(f"warmup_num_steps must be a positive integer, got {steps}")
    if kind not in ("log", "linear"):
        raise SettingError(f"warmup_type={kind!r} is neither 'log' nor 'linear'")
    return max(2, steps), kind


def _rise(i: int, steps: int, kind: str) -> float:
    return math.log(i + 1) / math.log(steps) if kind == "log" else i / steps


def _each(value: float | Sequence[float], groups: int, name: str) -> list[float]:
    if not isinstance(value, (list, tuple)):
        return [float(value)] * groups  # type: ignore[arg-type]
    if len(value) != groups:
        raise ValueError(f"expected {groups} values for {name}, got {len(value)}")
    return [float(v) for v in value]


SCHEDULES = {kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)}
