"""Parameters, optimizer states and objects of one rank on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...base.pytree import leaves, map_leaves
from ...errors import RefusedError
from .basics import ProcessSet, global_process_set, rank, running
from .mpi_ops import broadcast_async_, synchronize


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int) -> None:
    """Root's values in the tensors of `model.state_dict()` or `model.named_parameters()`, on every rank, in place.

    Raises:
        ValueError: `params` is neither of these, nor an iterable of tensors.
    """
    if isinstance(params, torch.nn.Module) or not isinstance(params, Iterable):
        raise ValueError(
            f"invalid params of type: {type(params)}: pass model.state_dict() or model.named_parameters()"
        )
    entries: Iterable[Any] = sorted(params.items()) if isinstance(params, Mapping) else params
    named = [e if isinstance(e, tuple) else (f"parameter.{i}", e) for i, e in enumerate(entries)]
    tensors = [(name, tensor) for name, tensor in named if isinstance(tensor, Tensor) and tensor.numel()]
    for handle in [broadcast_async_(tensor, root_rank, name) for name, tensor in tensors]:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Root's state and param groups (learning rates, …), on every rank. No step is made, so no weight moves.

    Args:
        optimizer: anything but LBFGS, or a DistributedOptimizer of it.
        root_rank: the rank that has the state.
        model: it tells Horovod which gradients are sparse, for the step that it makes; it has no effect here.

    Raises:
        RefusedError: LBFGS: its state is not a list of tensors by parameter.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise RefusedError("cannot broadcast torch.optim.LBFGS state: start it anew on every rank")
    own = optimizer.state_dict()
    kinds = iter([leaf.device.type for leaf in leaves(own) if isinstance(leaf, Tensor)])
    said = map_leaves(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, own)
    said, kinds = broadcast_object((said, list(kinds)), root_rank)
    if rank() != root_rank:
        places = iter(kinds)
        own = map_leaves(
            lambda leaf: torch.empty_like(leaf, device=next(places)) if isinstance(leaf, Tensor) else leaf,
            said,
        )
    broadcast_parameters(
        {f"state.{i}": leaf for i, leaf in enumerate(leaves(own)) if isinstance(leaf, Tensor)}, root_rank
    )
    if rank() != root_rank:
        load_in_place(optimizer, own, optimizer.load_state_dict)


def load_in_place(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], load: Callable[[dict[str, Any]], None]
) -> None:
    """`load` the state, and keep the objects of param groups and state.

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


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Root's object, on every rank; the others' objects are ignored."""
    run = running()
    run.members(process_set)
    if root_rank not in process_set.ranks:
        raise ValueError(f"broadcast_object received invalid root rank {root_rank} for {process_set}")
    return run.world.broadcast_objects([obj], root_rank, run.objects.get(process_set))[0]


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The ranks' objects, in rank order, on every rank."""
    return running().world.gather_objects(obj)
