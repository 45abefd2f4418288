"""Back from tagged JSON to Python state: the other half of `trees`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import CheckpointError
from .kinds import MAPPINGS, TAG
from .readers import READERS
from .strict import DEPTH


def unpack(value: Any, tensor: Callable[[str], Any]) -> Any:
    """What `pack` was given; `tensor` brings the tensor of a name.

    An array shares the memory of its tensor, so that one that is filled later fills the array. What `tensor` returns that is no tensor
    is put in place as it is.

    Raises:
        CheckpointError: `value` is nothing that `pack` returns.
    """
    try:
        return _unpack(value, tensor, 0)
    except RecursionError:
        raise CheckpointError(
            "a state is unpacked where too many functions had called one another: load from further out"
        ) from None


def names(value: Any) -> list[str]:
    """Of the tensors in what `pack` returned; raises as `unpack`."""
    found: list[str] = []
    unpack(value, found.append)
    return found


def _unpack(value: Any, tensor: Callable[[str], Any], depth: int) -> Any:
    if depth > DEPTH:
        raise CheckpointError(f"a state of more than {DEPTH} levels is none that was stored")
    if isinstance(value, list):
        return [_unpack(item, tensor, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: _unpack(item, tensor, depth + 1) for key, item in value.items()}
    kind = value[TAG]
    fields, read = READERS.get(kind, (None, None)) if isinstance(kind, str) else (None, None)
    if fields is None or read is None:
        raise CheckpointError(
            f"a state has a value of kind {kind!r:.80}, which this easymp does not know: update it"
        )
    given = {name: item for name, item in value.items() if name != TAG}
    if given.keys() != fields.keys() or not all(
        isinstance(item, fields[name]) for name, item in given.items()
    ):
        raise CheckpointError(f"a {kind} in a state is not as it was stored: {value!r:.80}")
    if kind in MAPPINGS.values():
        given["items"] = [_pair(item, tensor, depth + 2) for item in given["items"]]
    elif "items" in given:
        inner = _nowhere if kind in ("set", "frozenset") else tensor
        given["items"] = [_unpack(item, inner, depth + 2) for item in given["items"]]
    elif "name" in given:
        given["name"] = tensor(given["name"])
    elif kind == "scalar":
        given["value"] = _unpack(given["value"], _nowhere, depth + 1)
    try:
        return read(*(given[name] for name in fields))
    except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"a {kind} in a state is not as it was stored: {value!r:.80} ({error!s:.200})"
        ) from None


def _pair(item: Any, tensor: Callable[[str], Any], depth: int) -> tuple[Any, Any]:
    if not isinstance(item, list) or len(item) != 2:
        raise CheckpointError(f"a dict in a state has {item!r:.80} where a key and its value should be")
    return _unpack(item[0], _nowhere, depth + 1), _unpack(item[1], tensor, depth + 1)


def _nowhere(name: str) -> Any:
    raise CheckpointError(f"the tensor {name!r:.80} of a state is where none can be: in a set, or a key")
