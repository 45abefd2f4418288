"""Broadcasts of parameters, optimizer states and objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import RefusedError
from .engine import running
from .operations import broadcast_async_, synchronize


def broadcast_parameters(params: Mapping[str, Any] | Iterable[tuple[str, Tensor]], root_rank: int) -> None:
    """Root's values in the tensors of `model.state_dict()` or `model.named_parameters()`, on every rank, in place.

    Raises:
        ValueError: of something else.
    """
    if isinstance(params, Mapping):
        entries = sorted(params.items())
    elif isinstance(params, torch.nn.Module) or not isinstance(params, Iterable):
        raise ValueError(
            f"invalid params of type: {type(params)}: pass model.state_dict() or model.named_parameters()"
        )
    else:
        entries = [
            entry if isinstance(entry, tuple) else (f"parameter.{i}", entry) for i, entry in enumerate(params)
        ]
    tensors = [(name, tensor) for name, tensor in entries if isinstance(tensor, Tensor) and tensor.numel()]
    handles = [broadcast_async_(tensor.detach(), root_rank, f"broadcast.{name}") for name, tensor in tensors]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    """Root's state and param groups (learning rates, …), on every rank. No step is made, so no weight moves.

    Raises:
        RefusedError: LBFGS, whose state is no list of tensors by parameter.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise RefusedError("cannot broadcast torch.optim.LBFGS state: start it anew on every rank")
    root = running().world.rank == root_rank
    mine = optimizer.state_dict() if root else None
    tensors: list[Tensor] = []

    def described(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf)
        return ("tensor", len(tensors) - 1, tuple(leaf.shape), leaf.dtype, leaf.device.type)

    said = broadcast_object(_mapped(mine, described) if root else None, root_rank)
    device = running().world.device

    def filled(leaf: Any) -> Any:
        if not (isinstance(leaf, tuple) and len(leaf) == 5 and leaf[0] == "tensor"):
            return leaf
        _, number, shape, dtype, kind = leaf
        place = device if kind == device.type else kind
        tensor = tensors[number] if root else torch.empty(shape, dtype=dtype, device=place)
        handles.append(broadcast_async_(tensor, root_rank, f"state.{number}"))
        return tensor

    handles: list[int] = []
    state = _mapped(said, filled)
    for handle in handles:
        synchronize(handle)
    if not root:
        load_in_place(optimizer, state, optimizer.load_state_dict)


def load_in_place(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], load: Callable[[dict[str, Any]], None]
) -> None:
    """`load` the state; param groups and state stay the objects that they were.

    torch replaces them by new ones; a schedule or wrapper made before would keep the old ones, and rates would differ between ranks.
    """
    groups, values = optimizer.param_groups, optimizer.state
    load(state)
    for group, new in zip(groups, optimizer.param_groups):
        if group is not new:
            group.clear()
            group.update(new)
    if optimizer.state is not values:
        values.clear()
        values.update(optimizer.state)
    optimizer.param_groups, optimizer.state = groups, values


def _mapped(tree: Any, change: Any) -> Any:
    """`tree` of dicts and lists with its leaves changed; tuples count as leaves."""
    if isinstance(tree, dict):
        return {key: _mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_mapped(value, change) for value in tree]
    return change(tree)


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """Root's object, on every rank; the others' objects are ignored."""
    return running().world.broadcast_objects([obj], root_rank)[0]


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The ranks' objects, in rank order, on every rank."""
    return running().world.gather_objects(obj)
