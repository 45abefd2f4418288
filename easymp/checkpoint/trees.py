"""Python state as JSON, which runs no code when it is read: what plain JSON lacks is tagged, tensors go to files and leave their name.

``{"$": kind, …}`` stands for anything that is no str, int, float, bool, None, list, or dict with words as keys. What cannot be said so is
an error that names its path and the way out; nothing is ever called by name when it is read back.

Kept as they are: the builtin containers, and OrderedDict, Counter, defaultdict of a builtin; numbers of any size, bytes, torch's Size,
dtype and device, NumPy's scalars and arrays (as tensors in the files). Not kept: whether two places hold the same object, attributes set on
a container (a state_dict's `_metadata`), `requires_grad`, the byte order of an array. NumPy is not imported for any of it.
"""

from __future__ import annotations

import base64
import math
import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from .header import NAMES
from .kinds import FACTORIES, MAPPINGS, NUMPY_DTYPES, SEQUENCES, TAG
from .refusals import named, refusal
from .unpacking import names as names
from .unpacking import unpack as unpack

LEVELS = 50  # containers in one another; each takes at most three levels of JSON, and `strict` reads 200
WORD = 2**63  # integers from -WORD to 2 * WORD are numbers of JSON


def pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` in JSON's types; its tensors are put into `tensors` under their paths, which begin with `path`.

    Raises:
        CheckpointError: something that has no such form; the path says where.
    """
    try:
        return _Packing(tensors).pack(value, path)
    except RecursionError:
        raise CheckpointError(
            f"{path}: packed where too many functions had called one another: save from further out"
        ) from None


class _Packing:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._open: list[int] = []  # ids of the containers that hold what is being packed

    def pack(self, value: Any, path: str, hashed: bool = False) -> Any:
        """`hashed`: in a set, or as a key of a dict."""
        kind = type(value)
        if value is None or kind is bool or (kind is int and -WORD <= value < 2 * WORD):
            return value
        if kind is str:
            return (
                value
                if _encodable(value)
                else {TAG: "str", "value": _base64(value.encode("utf-8", "surrogatepass"))}
            )
        if kind is int:
            return {TAG: "int", "value": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {TAG: "float", "value": repr(value)}
        if kind is complex:
            return {TAG: "complex", "items": [self.pack(part, path) for part in (value.real, value.imag)]}
        if kind in (bytes, bytearray):
            return {TAG: kind.__name__, "value": _base64(value)}
        if kind in (torch.dtype, torch.device):
            return {TAG: kind.__name__, "value": str(value).removeprefix("torch.")}
        if not hashed and isinstance(value, Tensor):
            return {TAG: "tensor", "name": self._keep(_sound(value, path), path)}
        if kind is list or kind in SEQUENCES or kind in MAPPINGS:
            return self._container(value, path, hashed)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic) and value.dtype.name in NUMPY_DTYPES:
            return {TAG: "scalar", "dtype": value.dtype.name, "value": self.pack(value.item(), path)}
        if numpy is not None and kind is numpy.ndarray and not hashed and value.dtype.name in NUMPY_DTYPES:
            # A copy in native byte order; torch shares the memory of no array that is read-only or runs backwards.
            array = value.astype(value.dtype.newbyteorder("="), order="C")
            return {TAG: "array", "name": self._keep(torch.from_numpy(array), path)}
        raise CheckpointError(f"{path}: {refusal(value, hashed)}")

    def _container(self, value: Any, path: str, hashed: bool) -> Any:
        if id(value) in self._open:
            raise CheckpointError(f"{path}: contains itself: store the parts of it that do not")
        if len(self._open) == LEVELS:
            raise CheckpointError(
                f"{path}: more than {LEVELS} containers in one another: store a flatter one"
            )
        self._open.append(id(value))
        try:
            if type(value) in MAPPINGS:
                return self._mapping(value, path)
            if type(value) in (range, slice):
                items: Any = (value.start, value.stop, value.step)
            else:  # sets have no order of their own, and a checkpoint of the same state should have the same bytes
                items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
            hashed = hashed or isinstance(value, (set, frozenset))
            packed = [self.pack(item, f"{path}/{i}", hashed) for i, item in enumerate(items)]
        finally:
            self._open.pop()
        return packed if type(value) is list else {TAG: SEQUENCES[type(value)], "items": packed}

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        kind = MAPPINGS[type(value)]
        if kind == "dict" and TAG not in value and all(type(key) is str and _encodable(key) for key in value):
            return {key: self.pack(item, f"{path}/{key}") for key, item in value.items()}
        packed: dict[str, Any] = {TAG: kind}
        if isinstance(value, defaultdict):
            name = next(
                (name for name, factory in FACTORIES.items() if factory is value.default_factory), None
            )
            if name is None:
                raise CheckpointError(
                    f"{path}: a defaultdict of {named(value.default_factory)} can't be stored: store dict(…) of it"
                )
            packed["of"] = name
        packed["items"] = [
            [self.pack(key, f"{path}/key {i}", hashed=True), self.pack(item, f"{path}/{_step(key, i)}")]
            for i, (key, item) in enumerate(value.items())
        ]
        return packed

    def _keep(self, tensor: Tensor, path: str) -> str:
        while path in self._tensors:  # {"a/b": …, "a": {"b": …}}, or {"0": …, 0: …}
            path += "'"
        self._tensors[path] = tensor
        return path


def _sound(value: Tensor, path: str) -> Tensor:
    spread = sys.modules.get("torch.distributed.tensor")  # long to import, and no DTensor is here before
    plain = (
        (Tensor, nn.Parameter, nn.Buffer)
        if spread is None
        else (Tensor, nn.Parameter, nn.Buffer, spread.DTensor)
    )
    if type(value) not in plain:
        raise CheckpointError(
            f"{path}: a {named(type(value))} would come back as a plain tensor: store .as_subclass(torch.Tensor) of it"
        )
    if value.layout != torch.strided:
        raise CheckpointError(
            f"{path}: a tensor of layout {value.layout} can't be stored: store .to_dense() of it"
        )
    if value.dtype not in NAMES:
        raise CheckpointError(
            f"{path}: a tensor of {value.dtype} can't be stored: convert it, or store a .view() of it as torch.uint8"
        )
    return value


def _base64(content: bytes | bytearray) -> str:
    return base64.b64encode(content).decode()


def _encodable(text: str) -> bool:
    try:
        text.encode()
        return True
    except UnicodeEncodeError:  # half of a surrogate pair, as in names of files that are no text
        return False


def _step(key: Any, number: int) -> str:
    """The part of a path that says which item of a dict."""
    if type(key) is str:
        return key.encode(errors="backslashreplace").decode()
    return str(key) if key is None or (isinstance(key, int) and -WORD <= key < WORD) else f"item {number}"
