"""Why a value of a user's state can't be stored, and what can in its place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

REMEDIES = {
    "enum.Enum": "its .value",
    "datetime.date": "its isoformat()",
    "datetime.time": "its isoformat()",
    "datetime.timedelta": "its total_seconds()",
    "collections.deque": "list(…) of it",
    "decimal.Decimal": "str(…) of it",
    "fractions.Fraction": "its as_integer_ratio()",
    "random.Random": "its getstate()",
}


def refusal(value: Any, hashed: bool) -> str:
    """Why it can't be stored, and what can."""
    kind = type(value)
    what = f"a {named(kind)} can't be stored"
    if hashed and isinstance(value, Tensor):
        return f"{what} in a set, or as a key of a dict: use a list, or another key"
    if isinstance(value, (FunctionType, BuiltinFunctionType, MethodType)):
        return f"a function ({value.__name__.strip('<>')}) can't be stored: leave it out, and set it again after loading"
    if isinstance(value, type):
        return f"a class ({named(value)}) can't be stored: store its name, and look it up yourself"
    if isinstance(value, torch.Generator):
        return f"{what}: store its get_state()"
    if kind.__module__.partition(".")[0] == "numpy":
        if kind.__name__ in ("Generator", "RandomState"):
            return f"{what}: store " + (
                "its bit_generator.state" if kind.__name__ == "Generator" else "its get_state()"
            )
        return f"a NumPy {kind.__name__} of {getattr(value, 'dtype', 'unknown type')} can't be stored: store its tolist(), or a number type"
    if isinstance(value, os.PathLike):  # by name it is another class in Python 3.13
        return f"{what}: store str(…) of it"
    for base, remedy in REMEDIES.items():
        if any(f"{c.__module__}.{c.__qualname__}" == base for c in kind.__mro__):
            return f"{what}: store {remedy}"
    if isinstance(value, tuple):
        return f"{what} (its class would be lost): store tuple(…) of it"
    if isinstance(value, Mapping):
        return f"{what} (its class would be lost): store dict(…) of it"
    for base in (str, int, float, bytes, list, set, frozenset):
        if isinstance(value, base):
            return f"{what} (its class would be lost): store {base.__name__}(…) of it"
    if callable(getattr(value, "state_dict", None)):
        return f"{what}: store its state_dict()"
    return f"{what}: store numbers, words, tensors, and lists or dicts of them"


def named(kind: Any) -> str:
    """A class as a reader would write it."""
    name = getattr(kind, "__qualname__", repr(kind)).replace("<locals>.", "")
    return (
        name
        if getattr(kind, "__module__", "builtins") in ("builtins", "__main__")
        else f"{kind.__module__}.{name}"
    )
