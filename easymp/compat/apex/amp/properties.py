"""What each optimization level does, and what a caller may change of it.

Source: https://nvidia.github.io/apex/amp.html#opt-levels-and-properties.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ....errors import nearest
from ..saying import ApexError

TYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Properties:
    """What becomes of models, functions, optimizers and losses.

    Attributes:
        brief: what the level is, in a few words.
        cast_model_type: of parameters, buffers and inputs; None leaves them.
        patch_torch_functions: torch's functions cast their arguments by Apex's lists.
        keep_batchnorm_fp32: batch-norm with parameters of its own stays fp32.
        master_weights: optimizers step fp32 copies of half parameters.
        loss_scale: a number, or "dynamic".
    """

    brief: str
    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool | None = False
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: float | str = "dynamic"


LEVELS = {
    "O0": Properties("fp32 training", torch.float32, False, None, False, 1.0),
    "O1": Properties("casts around torch's functions", None, True, None, None, "dynamic"),
    "O2": Properties(
        "fp16 training with fp32 batch-norm and fp32 master weights",
        torch.float16,
        False,
        True,
        True,
        "dynamic",
    ),
    "O3": Properties("pure fp16 training", torch.float16, False, False, False, 1.0),
}


def properties(level: str, given: dict[str, Any]) -> Properties:
    """Those of `level`, with what was `given` and is not None.

    Raises:
        ApexError: a level or value that is not known, or a property that the level does not take.
    """
    if level not in LEVELS:
        raise ApexError(
            f"Unexpected optimization level {level!r}{nearest(level, LEVELS) or '.'} Options are 'O0', 'O1', 'O2', 'O3'. Note "
            "that in `O0`, `O1`, etc., the prefix O is the letter O, not the number zero"
        )
    start = LEVELS[level]
    changed = {name: _read(name, value) for name, value in given.items() if value is not None}
    for name, value in changed.items():
        if start.patch_torch_functions and (why := _CASTS_DO_IT.get(name)) and value is not torch.float32:
            raise ApexError(
                f"{name}={value!r} with opt_level {level}: {why}. Leave it out, or use opt_level 'O2' or 'O3'"
            )
        if name == "patch_torch_functions" and value and not start.patch_torch_functions:
            raise ApexError(
                f"patch_torch_functions=True with opt_level {level}: only opt_level='O1' casts around functions"
            )
    if start.patch_torch_functions:
        changed.pop("cast_model_type", None)  # fp32, which the weights are
    return replace(start, **changed)


_CASTS_DO_IT = {
    "cast_model_type": "O1 inserts casts around torch's functions, and the weights themselves stay fp32",
    "keep_batchnorm_fp32": "O1 runs batch-norm in fp32 anyway",
    "master_weights": "O1's weights are fp32 themselves",
}
_WORDS = {"True": True, "False": False, True: True, False: False}


def _read(name: str, value: Any) -> Any:
    if name == "loss_scale":
        return _scale(value)
    if name == "cast_model_type":
        if value not in TYPES:
            raise ApexError(f"cast_model_type={value!r} is none of {', '.join(map(str, TYPES))}")
        return value
    if not isinstance(value, (bool, str)) or value not in _WORDS:
        raise ApexError(f"{name}={value!r} must be a boolean, the string 'True' or 'False', or None")
    return _WORDS[value]


def _scale(value: Any) -> float | str:
    if isinstance(value, str) and value == "dynamic":
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if isinstance(value, bool) or not 0.0 < number < float("inf"):
        raise ApexError(f"loss_scale={value!r} must be a positive number, or 'dynamic'")
    return number
