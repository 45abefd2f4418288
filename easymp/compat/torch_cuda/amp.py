"""``torch.cuda.amp`` on any device: autocast, GradScaler, custom_fwd and custom_bwd by torch's signatures.

torch's own turn themselves off, in a warning, on a machine without CUDA; these work on the accelerator that is here, and on the CPU
where there is none (in real fp16 unless a dtype is given). The scaler is the library's own, with torch's rule. Not here:
internals of torch's GradScaler (``_per_optimizer_states``, ``_found_inf_per_device``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ...errors import SettingError
from ...options import GradScalerKwargs
from ...precision import Scaler
from ..layer import Layer

__all__ = ["GradScaler", "amp_definitely_not_available", "autocast", "custom_bwd", "custom_fwd"]

NATIVE = """
acc = Accelerator(mixed_precision="fp16")  # or "auto"
model, optimizer, loader = acc.prepare(model, optimizer, loader)
loss = loss_fn(model(x), y)  # autocast is the prepared model's
acc.backward(loss)           # scaler.scale(loss).backward()
acc.clip_grad_norm_(model.parameters(), 1.0)  # scaler.unscale_(optimizer), and clip
optimizer.step()             # scaler.step(optimizer); scaler.update()
"""

layer = Layer("torch.cuda.amp")
__getattr__ = layer.absent("torch.cuda.amp", {}, lambda: __all__)


def device_type() -> str:
    """Type of the accelerator of this machine, or "cpu"."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None else "cpu"


class autocast(torch.autocast):
    """`torch.autocast` on the device that is here; a context manager and a decorator.

    Args:
        enabled: False turns off an autocast around it.
        dtype: of the functions on autocast's list: torch.float16, or torch.bfloat16.
        cache_enabled: keep the casts of weights until the outermost block ends.
    """

    def __init__(
        self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
    ) -> None:
        layer.use("autocast and GradScaler", NATIVE)
        super().__init__(device_type(), dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


class GradScaler(Scaler):
    """Scales losses and skips steps that overflowed; torch's methods, order of calls and state dict.

    Calls in a wrong order are `StepError`, a RuntimeError that says which call came too early.

    Args:
        init_scale: the first scale.
        growth_factor: multiplies the scale after `growth_interval` good steps in a row.
        backoff_factor: multiplies the scale after an overflow.
        enabled: False scales by one and skips nothing.

    Raises:
        SettingError: a number outside of its range.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        layer.use("autocast and GradScaler", NATIVE)
        super().__init__(
            GradScalerKwargs(init_scale, growth_factor, backoff_factor, growth_interval), enabled=enabled
        )

    def _rule(self, **changes: Any) -> None:
        self.rule = dataclasses.replace(self.rule, **changes)

    def get_growth_factor(self) -> float:
        return self.rule.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        self._rule(growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        return self.rule.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        self._rule(backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        return self.rule.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        self._rule(growth_interval=new_interval)

    def is_enabled(self) -> bool:
        return self.enabled

    def state_dict(self) -> dict[str, Any]:
        """torch's five keys; empty where it is not enabled."""
        return {name: value for name, value in super().state_dict().items() if name != "hysteresis"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Scale, counters and, unlike the library's own scaler, the rule, as torch's does.

        Raises:
            SettingError: a key is missing; nothing has changed.
        """
        if self.enabled and state_dict:
            absent = [name for name in self.state_dict() if name not in state_dict]
            if absent:
                raise SettingError(
                    f"this state has no {', '.join(absent)}: pass what state_dict() of a GradScaler returned, torch's or this one's"
                )
            self._rule(
                **{name: state_dict[name] for name in ("growth_factor", "backoff_factor", "growth_interval")}
            )
        super().load_state_dict(state_dict)


def custom_fwd(
    fwd: Callable[..., Any] | None = None, *, cast_inputs: torch.dtype | None = None
) -> Callable[..., Any]:
    """For the forward of an autograd.Function under `autocast`: as torch.amp.custom_fwd, on the device that is here."""
    return torch.amp.custom_fwd(fwd, device_type=device_type(), cast_inputs=cast_inputs)


def custom_bwd(bwd: Callable[..., Any]) -> Callable[..., Any]:
    """For its backward: under the autocast of its forward."""
    return torch.amp.custom_bwd(bwd, device_type=device_type())


def amp_definitely_not_available() -> bool:
    """False: every machine has a CPU."""
    return False
