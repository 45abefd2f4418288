"""``torch.cuda.amp`` on any device: ``from easymp.compat.torch_cuda.amp import autocast, GradScaler``.

torch's own turn themselves off, in a warning, on a machine without CUDA. These are torch's, on the accelerator that is
here, and on the CPU where there is none (in real fp16 unless a dtype is given).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from .layer import Layer, by_name

__all__ = ["amp"]  # noqa: F822 (made below)

layer = Layer("torch.cuda.amp", "torch_cuda", "torch.cuda")
layer.instead = dict.fromkeys(dir(torch.cuda), "all but amp is torch's own: import it from torch.cuda")
__getattr__ = layer.absent(__name__)


def device_type() -> str:
    """Type of the accelerator of this machine, or "cpu"."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


class autocast(torch.autocast):
    """`torch.autocast` on the device that is here; a context manager and a decorator."""

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> None:
        super().__init__(device_type(), dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` on the device that is here, with its methods, errors, state dict and pickle."""

    def __init__(
        self, init_scale: float = 2.0**16, growth_factor: float = 2.0, backoff_factor: float = 0.5,
        growth_interval: int = 2000, enabled: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(device_type(), init_scale, growth_factor, backoff_factor, growth_interval, enabled)


def custom_fwd(fwd: Callable[..., Any] | None = None, *, cast_inputs: torch.dtype | None = None) -> Any:
    """As `torch.amp.custom_fwd`, on the device that is here."""
    return torch.amp.custom_fwd(fwd, device_type=device_type(), cast_inputs=cast_inputs)


def custom_bwd(bwd: Callable[..., Any]) -> Any:
    """As `torch.amp.custom_bwd`, on the device that is here."""
    return torch.amp.custom_bwd(bwd, device_type=device_type())


NOT_AVAILABLE = {"amp_definitely_not_available": lambda: False}  # every machine has a CPU
layer.submodules(
    __name__,
    {
        "amp": by_name(GradScaler, autocast, custom_bwd, custom_fwd) | NOT_AVAILABLE,
        "amp.autocast_mode": by_name(autocast, custom_bwd, custom_fwd),
        "amp.common": NOT_AVAILABLE,
        "amp.grad_scaler": by_name(GradScaler, OptState),
    },
)
