"""The kinds of values that a tag stands for in a packed state, by their names."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import Any

import torch

TAG = "$"
SEQUENCES: dict[type, str] = {
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    torch.Size: "size",
    range: "range",
    slice: "slice",
}
MAPPINGS: dict[type, str] = {
    dict: "dict",
    OrderedDict: "ordered",
    Counter: "counter",
    defaultdict: "defaultdict",
}
FACTORIES: dict[str, Any] = {f.__name__: f for f in (int, float, bool, str, list, dict, set, tuple)} | {
    "none": None
}
TORCH_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
# What NumPy and torch both have; the names are the same.
NUMPY_DTYPES = {
    name: TORCH_DTYPES[name]
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
