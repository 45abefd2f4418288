"""data_parallel: one process, several accelerators: each call copies the model to all of them and splits the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from ..distributed import World
from ..errors import RefusedError, SettingError
from ..logging import get_logger
from ..protocols import Facts, Manner, Refusal
from .single import Single

logger = get_logger(__name__)


@dataclass(frozen=True)
class DataParallelOptions:
    """Options of strategy "data_parallel".

    Attributes:
        devices: indices of the accelerators to use, the one that holds the model first; None takes all that are visible.
    """

    devices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.devices is None:
            return
        devices = tuple(self.devices) if isinstance(self.devices, (list, tuple, range)) else ()
        if (
            not devices
            or len(set(devices)) < len(devices)
            or any(type(d) is not int or d < 0 for d in devices)
        ):
            raise SettingError(
                f"devices={self.devices!r} is not a list of different device indices, such as (0, 1)"
            )
        object.__setattr__(self, "devices", devices)


class DataParallel(Single):
    """torch's nn.DataParallel, around the model under autocast; with fewer than two accelerators the model itself, as in "single".

    The loader's batch is the whole: it is split along dimension 0, outputs are put together again. A forward that returns the loss
    returns one a device: average them. What forward writes stays only on the first device, and batch-norm takes each device's share
    by itself, also with `convert_sync_batchnorm`. ddp does the same faster, without copies and with a process a device.
    """

    name: ClassVar[str] = "data_parallel"
    Options: ClassVar[type] = DataParallelOptions

    def __init__(self, world: World, options: DataParallelOptions) -> None:  # type: ignore[override]
        self._device = world.device
        self._devices = choose_devices(world.device, options.devices)
        if len(self._devices) > 1:
            self.only_forward = "calls copies of the model, by forward alone"

    @staticmethod
    def refuse(facts: Facts) -> Refusal | None:
        if facts.world_size > 1:
            return Refusal(
                f"strategy 'data_parallel' is for one process that drives several devices, and {facts.world_size} were started",
                "use strategy='ddp', which is the faster one, or start one process",
            )
        return None

    def wrap(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], manner: Manner
    ) -> nn.Module:
        module = super().wrap(model, optimizers, manner)
        count = len(self._devices)
        if count < 2:
            logger.info("data_parallel: one device (%s), so the model runs as it is", self._device)
            return module
        compiled = [
            name or "the model"
            for name, part in module.named_modules()
            if part._compiled_call_impl is not None
        ]
        if compiled:
            raise RefusedError(
                f"data_parallel calls copies of the model, and the compiled code of {compiled[0]} would run in each of them with the "
                "first one's parameters: leave compiling out, or use strategy='ddp'"
            )
        logger.info(
            "data_parallel copies the model to %d devices at each call; ddp is faster: `easymp launch --processes %d`",
            count,
            count,
        )
        return nn.DataParallel(module, list(self._devices))


def choose_devices(device: torch.device, wanted: tuple[int, ...] | None) -> tuple[int, ...]:
    """Indices of the devices of `device`'s kind that a model on `device` is spread over.

    Raises:
        RefusedError: some of `wanted` are not here, or the model is not on the first of them.
    """
    here = torch.get_device_module(device).device_count() if device.type in ("cuda", "xpu") else 0
    first = device.index or 0
    if wanted is None:
        return (first, *(d for d in range(here) if d != first)) if here else ()
    missing = [d for d in wanted if d >= here]
    if missing:
        raise RefusedError(
            f"devices={wanted}, but there are {here} accelerators here, counted from 0: leave out {missing}"
        )
    if wanted[0] != first:
        raise RefusedError(f"devices={wanted}, but the model is put on device {first}: name that one first")
    return wanted
