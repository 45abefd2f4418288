"""The state of amp in this process (level, a loss scale for each loss, optimizers, verbosity), and Apex's messages and errors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from ....errors import EasympError, nearest
from ....options import GradScalerKwargs
from ....precision import Scaler
from ...layer import Layer
from .casts import AmpHandle, handle

layer = Layer("Apex")


class ApexError(EasympError, RuntimeError):
    """An error that Apex raises as RuntimeError, or a case that Apex would compute wrongly without an error."""


class LossScaler:
    """The scale of one loss, which moves at the end of each `scale_loss` of this loss.

    A scale that was given as a number is constant, and skips no step.
    """

    number = 0  # of the loss

    def __init__(
        self, loss_scale: float | str, init_scale: float = 2.0**16, scale_factor: float = 2.0, scale_window: int = 2000,
        min_loss_scale: float | None = None, max_loss_scale: float = 2.0**24,
    ) -> None:  # fmt: skip
        self.dynamic = loss_scale == "dynamic"
        rule = GradScalerKwargs(
            *(min(init_scale, max_loss_scale), scale_factor, 1 / scale_factor, scale_window),
            min_scale=min_loss_scale or 0.0,
            max_scale=max_loss_scale,
        )
        self.scaler = Scaler(rule if self.dynamic else GradScalerKwargs(float(loss_scale), dynamic=False))
        self._counted = 0

    def loss_scale(self) -> float:
        """The factor of the loss. Waits for the device."""
        return self.scaler.get_scale()

    @property
    def _loss_scale(self) -> float:
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, scale: float) -> None:
        self.scaler.update(scale)

    @property
    def _unskipped(self) -> int:
        """Good blocks since the last overflow or growth; of a scale that does not move, all of them."""
        return int(self.scaler.state_dict()["_growth_tracker"]) if self.dynamic else self._counted

    def overflowed(self, found: torch.Tensor) -> bool:
        """Move the scale; whether steps are to be skipped, as `found` is above 0. Waits for the device."""
        if not self.dynamic:
            self._counted += 1
            return False
        self.scaler.advance(found)
        return bool(found.item())


@dataclass(frozen=True)
class Properties:
    """A level's properties, by Apex's names. None and False leave types as they are."""

    enabled: bool = False
    opt_level: str | None = None
    cast_model_type: torch.dtype | bool | None = None
    patch_torch_functions: bool | None = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: float | str = 1.0


PROPERTIES = [field.name for field in fields(Properties)][2:]


class AmpState:
    """The state that the last `initialize` left, by the names under which scripts read it."""

    def __init__(self) -> None:
        self.opt_properties: Properties | None = None  # before `initialize`
        self.allow_incoming_model_not_fp32 = False  # lets `initialize` take half parameters
        self.verbosity = 1
        self.loss_scalers: list[LossScaler] = []
        self.handle: AmpHandle = handle
        self.optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()

    def loss(self, number: int) -> LossScaler:
        """The scaler of loss `number`."""
        if 0 <= number < (made := len(self.loss_scalers)):
            return self.loss_scalers[number]
        raise ApexError(
            f"loss_id={number}, and amp.initialize made {made} loss scalers: pass num_losses={number + 1}"
        )


state = AmpState()


def maybe_print(msg: str, rank0: bool = False) -> None:
    """Print, unless verbosity=0; with `rank0` on rank 0 only."""
    many = dist.is_available() and dist.is_initialized()
    if state.verbosity > 0 and not (rank0 and many and dist.get_rank()):
        print(msg)  # noqa: T201 (Apex's interface, with a parameter to turn it off)


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """``loss_scaler0``, ``loss_scaler1`` … → {"loss_scale", "unskipped"}; in `destination`, if given."""
    found: dict[str, Any] = OrderedDict() if destination is None else destination
    for i, scaler in enumerate(state.loss_scalers):
        found[f"loss_scaler{i}"] = {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped}
    return found


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Take scales and counters; call it after `initialize`. A line says so where there are more or fewer than losses."""
    unknown = [key for key in state_dict if not str(key).startswith("loss_scaler")]
    if unknown:
        said = ", ".join(map(repr, unknown))
        raise ApexError(f"unexpected keys in amp's state_dict: {said}. Pass what amp.state_dict() returned")
    if (entries := len(state_dict)) != (used := len(state.loss_scalers)):
        maybe_print(f"Warning: state_dict contains {entries} entries, while {used} loss_scalers are used")
    for scaler, entry in zip(state.loss_scalers, state_dict.values()):
        scaler.scaler.load_state_dict({"scale": entry["loss_scale"], "_growth_tracker": entry["unskipped"]})
        scaler._counted = int(entry["unskipped"])


LEVELS = {
    "O0": Properties(True, "O0", torch.float32, False, None, False, 1.0),
    "O1": Properties(True, "O1", None, True, None, None, "dynamic"),
    "O2": Properties(True, "O2", torch.float16, False, True, True, "dynamic"),
    "O3": Properties(True, "O3", torch.float16, False, False, False, 1.0),
}
O1_REFUSES = {
    "cast_model_type": "O1 inserts casts around torch's functions, and the weights themselves stay fp32",
    "keep_batchnorm_fp32": "O1 runs batch-norm in fp32 anyway",
    "master_weights": "O1's weights are fp32 themselves",
}
TYPES = (torch.float32, torch.float16, torch.bfloat16, False)
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
        why = O1_REFUSES.get(name) if start.patch_torch_functions else None
        if why and not (name == "cast_model_type" and value in (torch.float32, False)):
            raise ApexError(f"{name}={value!r} with opt_level {level}: {why}. Leave it out, or use O2 or O3")
        if name == "patch_torch_functions" and value and not start.patch_torch_functions:
            raise ApexError(f"{name}=True with opt_level {level}: only opt_level='O1' casts around functions")
    if start.patch_torch_functions:
        changed.pop("cast_model_type", None)  # fp32, the type of the weights
    return replace(start, **changed)


def _read(name: str, value: Any) -> Any:
    """The value of a property, checked."""
    if name == "loss_scale":
        try:
            number = value if value == "dynamic" else float(value)
        except (TypeError, ValueError):
            number = 0.0
        if number != "dynamic" and (isinstance(value, bool) or not 0.0 < number < float("inf")):
            raise ApexError(f"loss_scale={value!r} must be a positive number, or 'dynamic'")
        return number
    if name == "cast_model_type":
        if not any(value is known for known in TYPES):
            raise ApexError(f"cast_model_type={value!r} is not one of {', '.join(map(str, TYPES))}")
        return value
    if not isinstance(value, (bool, str)) or value not in BOOLEANS:
        raise ApexError(f"{name}={value!r} must be a boolean, the string 'True' or 'False', or None")
    return BOOLEANS[value]
