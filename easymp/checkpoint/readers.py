"""How each kind of tagged value is read back from a state: by a function of its fields, which have the types that stand beside it.

What a reader raises says that the fields are nothing that `trees.pack` writes.
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .kinds import FACTORIES, NUMPY_DTYPES, TORCH_DTYPES

COLLISIONS = 1000  # equal hashes in a set or dict; time grows with their square, and whoever writes the file can choose them


def _distinct(items: list[Any]) -> list[Any]:
    _expect(max(Counter(map(hash, items)).values(), default=0) <= COLLISIONS)
    return items


def _expect(right: bool) -> None:
    if not right:
        raise ValueError("no such value is written")


def _set(make: Callable[[list[Any]], Any], items: list[Any]) -> Any:
    made = make(_distinct(items))
    _expect(len(made) == len(items))
    return made


def _dict(make: Callable[[Any], Any], items: list[tuple[Any, Any]]) -> Any:
    _distinct([key for key, _ in items])
    made = dict(items)
    _expect(len(made) == len(items))
    return made if make is dict else make(made)


def _integer(value: str) -> int:
    number = int(value, 16)
    _expect(hex(number) == value)
    return number


def _complex(items: list[Any]) -> complex:
    real, imaginary = items
    _expect(type(real) is float and type(imaginary) is float)
    return complex(real, imaginary)


def _integers(make: Callable[[list[int]], Any], items: list[Any]) -> Any:
    _expect(all(type(item) is int and abs(item) < 2**63 for item in items))
    return make(items)


def _range(items: list[int]) -> range:
    start, stop, step = items
    return range(start, stop, step)


def _slice(items: list[Any]) -> slice:
    start, stop, step = items
    return slice(start, stop, step)


def _array(name: Any) -> Any:
    return name.numpy() if isinstance(name, Tensor) else name


def _scalar(dtype: str, value: Any) -> Any:
    _expect(type(value) in (bool, int, float, complex))
    found = torch.tensor(value, dtype=NUMPY_DTYPES[dtype], device="cpu").numpy()[()]
    _expect(type(found.item()) is type(value) and (found.item() == value or value != value))
    return found


def _bytes(value: str) -> bytes:
    return base64.b64decode(value, validate=True)


Reader = tuple[dict[str, type], Callable[..., Any]]
READERS: dict[str, Reader] = {
    "tensor": ({"name": str}, lambda name: name),
    "array": ({"name": str}, _array),
    "scalar": ({"dtype": str, "value": object}, _scalar),
    "str": ({"value": str}, lambda value: _bytes(value).decode("utf-8", "surrogatepass")),
    "int": ({"value": str}, _integer),
    "float": ({"value": str}, lambda value: {word: float(word) for word in ("nan", "inf", "-inf")}[value]),
    "complex": ({"items": list}, _complex),
    "bytes": ({"value": str}, _bytes),
    "bytearray": ({"value": str}, lambda value: bytearray(_bytes(value))),
    "dtype": ({"value": str}, lambda value: TORCH_DTYPES[value]),
    "device": ({"value": str}, torch.device),
    "tuple": ({"items": list}, tuple),
    "set": ({"items": list}, partial(_set, set)),
    "frozenset": ({"items": list}, partial(_set, frozenset)),
    "size": ({"items": list}, partial(_integers, torch.Size)),
    "range": ({"items": list}, partial(_integers, _range)),
    "slice": ({"items": list}, _slice),
    "dict": ({"items": list}, partial(_dict, dict)),
    "ordered": ({"items": list}, partial(_dict, OrderedDict)),
    "counter": ({"items": list}, partial(_dict, Counter)),
    "defaultdict": (
        {"of": str, "items": list},
        lambda of, items: _dict(partial(defaultdict, FACTORIES[of]), items),
    ),
}
