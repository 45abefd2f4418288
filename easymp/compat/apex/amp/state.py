"""What amp holds for this process: its level, one loss scale a loss, the optimizers, and how much it says."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from ....precision import LossScale, Scaler
from ..saying import ApexError
from .properties import Properties


class LossScaler:
    """The scale of one loss: the library's own scaler, which moves at the end of each `scale_loss` of this loss.

    A scale that was given as a number stays what it is, and skips no step.

    Args:
        number: of the loss.
        scale: a number, or "dynamic".
        minimum, maximum: of a dynamic one.
    """

    def __init__(self, number: int, scale: float | str, minimum: float | None, maximum: float) -> None:
        self.number = number
        self.dynamic = isinstance(scale, str)
        rule = LossScale(minimum=minimum or 0.0, maximum=maximum, initial=min(2.0**16, maximum))
        self.scaler = Scaler(rule if self.dynamic else LossScale(initial=float(scale), dynamic=False))
        self._counted = 0

    def loss_scale(self) -> float:
        """What the loss is multiplied by. Waits for the device."""
        return self.scaler.get_scale()

    @property
    def unskipped(self) -> int:
        """Good contexts since the last overflow or growth; of a scale that does not move, all of them."""
        return int(self.scaler.state_dict()["_growth_tracker"]) if self.dynamic else self._counted

    def overflowed(self, found: torch.Tensor) -> bool:
        """Move the scale; whether steps are to be skipped. Waits for the device.

        Args:
            found: 0, or above it where a gradient was not finite.
        """
        if not self.dynamic:
            self._counted += 1
            return False
        self.scaler.advance(found)
        return bool(found.item())

    def state(self) -> dict[str, Any]:
        return {"loss_scale": self.loss_scale(), "unskipped": self.unskipped}

    def load(self, state: Mapping[str, Any]) -> None:
        self.scaler.load_state_dict({"scale": state["loss_scale"], "_growth_tracker": state["unskipped"]})
        self._counted = int(state["unskipped"])


class State:
    """Of the last `initialize`; its optimizers, of all that live.

    Attributes:
        properties: None before, and where it was turned off.
        enabled: False: losses are not scaled.
    """

    def __init__(self) -> None:
        self.properties: Properties | None = None
        self.enabled: bool | None = None
        self.verbosity = 1
        self.loss_scalers: list[LossScaler] = []
        self.optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()

    def say(self, words: str, once: bool = False) -> None:
        """Print, unless verbosity=0; `once` by rank 0 only."""
        many = dist.is_available() and dist.is_initialized()
        if self.verbosity > 0 and not (once and many and dist.get_rank()):
            print(words)  # noqa: T201 (Apex's interface, with a parameter to turn it off)

    def loss(self, number: int) -> LossScaler:
        """That of loss `number`.

        Raises:
            ApexError: there is none.
        """
        if not 0 <= number < len(self.loss_scalers):
            raise ApexError(
                f"loss_id={number}, and amp.initialize made {len(self.loss_scalers)} loss scalers: pass num_losses={number + 1} there"
            )
        return self.loss_scalers[number]


state = State()


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """``loss_scaler0``, ``loss_scaler1`` … → {"loss_scale", "unskipped"}; in `destination`, if given."""
    found: dict[str, Any] = OrderedDict() if destination is None else destination
    for scaler in state.loss_scalers:
        found[f"loss_scaler{scaler.number}"] = scaler.state()
    return found


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Take scales and counters; call it after `initialize`. A line says so where there are more or fewer than losses.

    Raises:
        ApexError: a key that is not one of `state_dict`'s. Nothing has changed then.
    """
    unknown = [key for key in state_dict if not str(key).startswith("loss_scaler")]
    if unknown:
        raise ApexError(
            f"unexpected keys in amp's state_dict: {', '.join(map(repr, unknown))}. Pass what amp.state_dict() returned, such as "
            "checkpoint['amp']"
        )
    if len(state_dict) != len(state.loss_scalers):
        state.say(
            f"Warning: state_dict contains {len(state_dict)} entries, while {len(state.loss_scalers)} loss_scalers are used"
        )
    for scaler, entry in zip(state.loss_scalers, state_dict.values()):
        scaler.load(entry)
