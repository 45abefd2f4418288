"""Nested batches: tuples, named tuples, lists, dicts, dataclasses and their like, with tensors as leaves.

A container comes back as its own type. Other objects with a ``to`` method (packed sequences, graph batches, tokenizer
outputs that are not mappings) are leaves, and move themselves by that method.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import BatchError, LeafError

T = TypeVar("T")
CYCLE = "a batch holds a list, dict or tuple that contains itself: return plain nested containers from collate_fn"


def map_leaves(function: Callable[[Any], Any], tree: Any, skip: Collection[Any] = ()) -> Any:
    """`tree` with ``function(leaf)`` for each leaf; values of mappings under a key in `skip` stay as they are."""
    try:
        return _map(function, tree, skip)
    except RecursionError:
        raise BatchError(CYCLE) from None


def _map(function: Callable[[Any], Any], tree: Any, skip: Collection[Any]) -> Any:
    if isinstance(tree, (Tensor, str, bytes)) or _moves_itself(tree):
        return function(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map(function, item, skip) for item in tree))
    if type(tree) is tuple or type(tree) is list:
        return type(tree)([_map(function, item, skip) for item in tree])
    if isinstance(tree, Mapping):
        items = {key: value if key in skip else _map(function, value, skip) for key, value in tree.items()}
        return items if type(tree) is dict else _rebuild(tree, items)
    if isinstance(tree, (list, tuple)):
        return _rebuild(tree, [_map(function, item, skip) for item in tree])
    if _is_record(tree):
        values = {key: _map(function, value, skip) for key, value in _fields(tree).items()}
        changed = {key: value for key, value in values.items() if value is not getattr(tree, key)}
        result = copy.copy(tree) if changed else tree  # made without its ``__init__``
        for key, value in changed.items():
            object.__setattr__(result, key, value)  # also where it is frozen
        return result
    return function(tree)


def _is_record(tree: Any) -> bool:
    """Whether `tree` is a dataclass without a ``to`` method of its own."""
    return hasattr(type(tree), "__dataclass_fields__") and not hasattr(tree, "to")


def _fields(tree: Any) -> dict[str, Any]:
    return {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if hasattr(tree, f.name)}


def _moves_itself(tree: Any) -> bool:
    """Whether a tuple has a ``to`` of its own (PackedSequence: its `batch_sizes` must stay on the CPU)."""
    return isinstance(tree, tuple) and callable(getattr(tree, "to", None))


def _rebuild(tree: Any, items: Any) -> Any:
    """A container subclass (OrderedDict, UserDict, a tokenizer's output) with new contents."""
    if hasattr(tree, "default_factory"):
        return type(tree)(tree.default_factory, items)
    try:
        if isinstance(tree, Mapping) and dataclasses.is_dataclass(tree):  # a model's output
            values = {f.name: items[f.name] for f in dataclasses.fields(tree) if f.name in items}
            output = dataclasses.replace(tree, **values)
            if output.keys() == items.keys():
                return output
        return type(tree)(items)
    except TypeError as error:
        raise BatchError(
            f"a batch holds a {type(tree).__name__}, which cannot be rebuilt from its items ({error}): return a plain "
            "dict, list or tuple from the collate function"
        ) from error


def leaves(tree: Any) -> Iterator[Any]:
    """Every leaf, depth first."""
    try:
        for _, leaf in leaf_paths(tree):
            yield leaf
    except RecursionError:
        raise BatchError(CYCLE) from None


def leaf_paths(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its path (``"['a'][0]"``), depth first, in the order of `map_leaves`."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaf_paths(value, f"{path}[{key!r}]")
    elif isinstance(tree, (list, tuple)) and not _moves_itself(tree):
        for number, item in enumerate(tree):
            yield from leaf_paths(item, f"{path}[{number}]")
    elif _is_record(tree):
        for name, value in _fields(tree).items():
            yield from leaf_paths(value, f"{path}.{name}")
    else:
        yield path, tree


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = torch.is_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply `func` to each leaf of a nested batch that passes `test_type`.

    Args:
        func: called as ``func(leaf, *args, **kwargs)``.
        data: lists, tuples, dicts, dataclasses, nested in any way.
        args: more arguments of `func`.
        test_type: tells which leaves to pass; by default tensors.
        error_on_other_type: refuse other leaves, which otherwise stay as they are.
        kwargs: more arguments of `func`.

    Returns:
        A batch of the same structure, with the results in place of the leaves.

    Raises:
        BatchError: a leaf of another type, with `error_on_other_type`; it is a TypeError, too.

    Example:
        >>> recursively_apply(torch.neg, {"x": torch.ones(2), "name": "a"})
        {'x': tensor([-1., -1.]), 'name': 'a'}
    """

    def apply(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            raise LeafError(
                f"{getattr(func, '__name__', 'the function')} takes nested lists, tuples and dicts of tensors, but a "
                f"leaf is a {type(leaf).__name__}: pass tensors only, or gather objects with gather_object"
            )
        return leaf

    return map_leaves(apply, data)


def find_batch_size(data: Any) -> int | None:
    """Find the number of samples in a nested batch.

    Args:
        data: tensors, nested in any way.

    Returns:
        Dimension 0 of the first tensor with at least one dimension; None without such a tensor.

    Example:
        >>> find_batch_size({"x": torch.ones(3, 2), "y": torch.ones(3)})
        3
    """
    return next((leaf.shape[0] for leaf in leaves(data) if isinstance(leaf, Tensor) and leaf.ndim), None)


def send_to_device(
    tensor: T,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> T:
    """Move a nested batch to a device.

    Args:
        tensor: tensors and objects with a ``to`` method, nested in any way.
        device: a torch.device, or its name.
        non_blocking: as in `torch.Tensor.to`.
        skip_keys: keys of dicts whose values stay where they are.

    Returns:
        A batch of the same structure.

    Example:
        >>> send_to_device({"x": torch.ones(2), "id": 7}, "meta")
        {'x': tensor(..., device='meta', size=(2,)), 'id': 7}
    """
    skip = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        if hasattr(leaf, "to") and not isinstance(leaf, type):
            try:
                return leaf.to(device, non_blocking=non_blocking)
            except TypeError:
                return leaf.to(device)
        return leaf

    moved: T = map_leaves(move, tensor, skip)
    return moved


def slice_tensors(data: Any, part: slice) -> Any:
    """Slice dimension 0 of every tensor by `part`; scalars and other leaves stay."""
    return map_leaves(lambda leaf: leaf[part] if isinstance(leaf, Tensor) and leaf.ndim else leaf, data)


def concatenate(data: Sequence[T], dim: int = 0) -> T:
    """Join nested batches of the same structure.

    Args:
        data: the batches. Leaves other than tensors are taken from the first.
        dim: the dimension to join along.

    Returns:
        A batch of the same structure.

    Example:
        >>> concatenate([{"x": torch.zeros(1)}, {"x": torch.ones(2)}])
        {'x': tensor([0., 1., 1.])}
    """
    batches = [dict(leaf_paths(batch)) for batch in data]
    paths = iter(batches[0])

    def join(leaf: Any) -> Any:
        path = next(paths)
        return torch.cat([leaves[path] for leaves in batches], dim) if isinstance(leaf, Tensor) else leaf

    joined: T = map_leaves(join, data[0])
    return joined
