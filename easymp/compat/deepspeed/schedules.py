"""DeepSpeed's learning-rate schedules: rates, attributes and state by its names, and its formulas, digit by digit.

A schedule counts its steps in `last_batch_iteration`, which is -1 before the first one. It is not a scheduler of torch, and its state is
that count alone. Formulas are those of DeepSpeed's documentation, "Learning Rate Schedulers".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import SettingError

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
        return (
            self.inverse_log_warm_up * math.log(i + 1)
            if self.warmup_type == "log"
            else i / self.warmup_num_steps
        )


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
