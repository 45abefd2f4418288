"""The state of amp in this process (level, a loss scale for each loss, optimizers, verbosity), and Apex's messages and errors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from ....errors import EasympError, nearest
from ....options import GradScalerKwargs
from ....precision import Scaler
from ...layer import Layer

layer = Layer("Apex")


class ApexError(EasympError, RuntimeError):
    """An error that Apex raises as RuntimeError, or a case that Apex would compute wrongly without an error."""


class LossScaler:
    """The scale of one loss, which moves at the end of each `scale_loss` of this loss.

    A scale that was given as a number is constant, and skips no step.

    Args:
        number: of the loss.
        scale: a number, or "dynamic".
        minimum, maximum: of a dynamic one.
    """

    def __init__(self, number: int, scale: float | str, minimum: float | None, maximum: float) -> None:
        self.number = number
        self.dynamic = isinstance(scale, str)
        if self.dynamic:
            rule = GradScalerKwargs(min(2.0**16, maximum), min_scale=minimum or 0.0, max_scale=maximum)
        else:
            rule = GradScalerKwargs(float(scale), dynamic=False)
        self.scaler = Scaler(rule)
        self._counted = 0

    def loss_scale(self) -> float:
        """The factor of the loss. Waits for the device."""
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
    """The state that the last `initialize` left; `optimizers` has all that are alive.

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

    def print(self, words: str, once: bool = False) -> None:
        """Print, unless verbosity=0; `once` by rank 0 only."""
        many = dist.is_available() and dist.is_initialized()
        if self.verbosity > 0 and not (once and many and dist.get_rank()):
            print(words)  # noqa: T201 (Apex's interface, with a parameter to turn it off)

    def loss(self, number: int) -> LossScaler:
        """The scaler of loss `number`."""
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
        state.print(
            f"Warning: state_dict contains {len(state_dict)} entries, while {len(state.loss_scalers)} loss_scalers are used"
        )
    for scaler, entry in zip(state.loss_scalers, state_dict.values()):
        scaler.load(entry)


@dataclass(frozen=True)
class Properties:
    """Properties of a level.

    Attributes:
        brief: the level in a few words.
        cast_model_type: of parameters, buffers and inputs; None leaves them.
        patch_torch_functions: torch's functions cast their arguments by Apex's lists.
        keep_batchnorm_fp32: batch-norm with parameters stays fp32.
        master_weights: optimizers step fp32 copies of half parameters.
        loss_scale: a number, or "dynamic".
    """

    brief: str
    cast_model_type: torch.dtype | None
    patch_torch_functions: bool | None
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: float | str


_O2 = "fp16 training with fp32 batch-norm and fp32 master weights"
LEVELS = {
    "O0": Properties("fp32 training", torch.float32, False, None, False, 1.0),
    "O1": Properties("casts around torch's functions", None, True, None, None, "dynamic"),
    "O2": Properties(_O2, torch.float16, False, True, True, "dynamic"),
    "O3": Properties("pure fp16 training", torch.float16, False, False, False, 1.0),
}
O1_REFUSES = {
    "cast_model_type": "O1 inserts casts around torch's functions, and the weights themselves stay fp32",
    "keep_batchnorm_fp32": "O1 runs batch-norm in fp32 anyway",
    "master_weights": "O1's weights are fp32 themselves",
}
TYPES = (torch.float32, torch.float16, torch.bfloat16)
BOOLEANS = {"True": True, "False": False, True: True, False: False}


def properties(level: str, given: dict[str, Any]) -> Properties:
    """Properties of `level`, overridden by those `given` that are not None."""
    if level not in LEVELS:
        raise ApexError(
            f"Unexpected optimization level {level!r}{nearest(level, LEVELS) or '.'} Options are 'O0', 'O1', 'O2', 'O3'. Note "
            "that in `O0`, `O1`, etc., the prefix O is the letter O, not the number zero"
        )
    start = LEVELS[level]
    changed = {name: _read(name, value) for name, value in given.items() if value is not None}
    for name, value in changed.items():
        if start.patch_torch_functions and (why := O1_REFUSES.get(name)) and value is not torch.float32:
            raise ApexError(
                f"{name}={value!r} with opt_level {level}: {why}. Leave it out, or use opt_level 'O2' or 'O3'"
            )
        if name == "patch_torch_functions" and value and not start.patch_torch_functions:
            raise ApexError(
                f"patch_torch_functions=True with opt_level {level}: only opt_level='O1' casts around functions"
            )
    if start.patch_torch_functions:
        changed.pop("cast_model_type", None)  # fp32, the type of the weights
    return replace(start, **changed)


def _read(name: str, value: Any) -> Any:
    if name == "loss_scale":
        return _read_scale(value)
    if name == "cast_model_type":
        if value not in TYPES:
            raise ApexError(f"cast_model_type={value!r} is not one of {', '.join(map(str, TYPES))}")
        return value
    if not isinstance(value, (bool, str)) or value not in BOOLEANS:
        raise ApexError(f"{name}={value!r} must be a boolean, the string 'True' or 'False', or None")
    return BOOLEANS[value]


def _read_scale(value: Any) -> float | str:
    if value == "dynamic":
        return "dynamic"
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if isinstance(value, bool) or not 0.0 < number < float("inf"):
        raise ApexError(f"loss_scale={value!r} must be a positive number, or 'dynamic'")
    return number
