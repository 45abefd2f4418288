"""Python state as JSON, without pickle: what plain JSON lacks is tagged, tensors go to files and leave their name.

``{"$": kind, …}`` stands for anything that is no str, int, float, bool, None, list, or dict with words as keys. What cannot be said so is
an error that names its path; nothing is ever called by name when it is read back.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..errors import CheckpointError

TAG = "$"


def pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` in JSON's types; its tensors are put into `tensors` under their paths, which begin with `path`.

    Raises:
        CheckpointError: something that has no such form; the path says where.
    """
    if isinstance(value, Tensor):
        tensors[path] = value
        return {TAG: "tensor", "name": path}
    if value is None or type(value) in (str, int, bool):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {TAG: "float", "value": repr(value)}
    if type(value) is bytes:
        return {TAG: "bytes", "value": base64.b64encode(value).decode()}
    if type(value) is list:
        return [pack(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]
    if type(value) in (tuple, set, frozenset):
        items = sorted(value, key=repr) if type(value) is not tuple else value
        return {TAG: type(value).__name__, "items": [pack(item, f"{path}/{i}", tensors) for i, item in enumerate(items)]}
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value) and TAG not in value:
            return {key: pack(item, f"{path}/{key}", tensors) for key, item in value.items()}
        pairs = [[pack(key, f"{path}/key", tensors), pack(item, f"{path}/{key}", tensors)] for key, item in value.items()]
        return {TAG: "dict", "items": pairs}
    raise CheckpointError(f"{path}: a {type(value).__name__} cannot be stored")


def unpack(value: Any, tensor: Callable[[str], Any]) -> Any:
    """What `pack` was given; `tensor` brings the tensor of a name."""
    if isinstance(value, list):
        return [unpack(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(TAG)
    if kind is None:
        return {key: unpack(item, tensor) for key, item in value.items()}
    if kind == "tensor":
        return tensor(value["name"])
    if kind == "float":
        return float(value["value"])
    if kind == "bytes":
        return base64.b64decode(value["value"])
    if kind == "dict":
        return {unpack(key, tensor): unpack(item, tensor) for key, item in value["items"]}
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](unpack(item, tensor) for item in value["items"])
