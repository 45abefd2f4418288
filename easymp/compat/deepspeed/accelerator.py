"""``deepspeed.accelerator.get_accelerator()``: the device by DeepSpeed's names, on torch.accelerator; the CPU where there is none."""

from __future__ import annotations

from typing import Any

import torch

from ...distributed import read_ranks
from ..layer import device_of


class Device:
    """The kind of device that ranks train on."""

    def __init__(self) -> None:
        self._kind = device_of(read_ranks()).type
        self._here = self._kind != "cpu"

    def device_name(self, device_index: int | None = None) -> str:
        """``"cuda"``, ``"cuda:1"``, ``"cpu"``."""
        return self._kind if device_index is None or not self._here else f"{self._kind}:{device_index}"

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return torch.accelerator.device_count() if self._here else 1

    def current_device(self) -> int:
        return torch.accelerator.current_device_index() if self._here else 0

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def set_device(self, device_index: int) -> None:
        if self._here:
            torch.accelerator.set_device_index(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        if self._here:
            torch.accelerator.synchronize(device_index)

    def communication_backend_name(self) -> str:
        return "nccl" if self._kind == "cuda" else "gloo"

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported() if self._kind == "cuda" else True

    def is_fp16_supported(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        """memory_allocated, empty_cache, manual_seed_all …: of torch.cuda, say. On the CPU memory is 0, and there is nothing to empty."""
        if name.startswith("_"):
            raise AttributeError(name)
        if self._here:
            return getattr(getattr(torch, self._kind), name)
        if name.startswith(("memory_", "max_memory_")):
            return lambda *_: 0
        if name in ("empty_cache", "reset_peak_memory_stats", "manual_seed", "manual_seed_all"):
            return lambda *_: None
        raise AttributeError(
            f"get_accelerator().{name} is not part of easymp.compat: use torch.accelerator, or torch.{self._kind}"
        )


def get_accelerator() -> Device:
    """The device of this process."""
    return Device()
