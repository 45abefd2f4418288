"""Collectives over nested batches: functions of a tree, on the open run's world or a given one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from ..base.lazy import modules_at_first_use
from ..base.pytree import leaf_paths, leaves, map_leaves, recursively_apply
from ..errors import ALIKE, BatchError, SettingError, WorldError

if TYPE_CHECKING:
    from ..distributed import World
    from . import state

modules_at_first_use(globals(), "state")
T = TypeVar("T")
Reduction = Literal["sum", "mean", "none"]

LENGTHS = (
    f"{ALIKE}: pad_across_processes() makes tensors equally long, and gather_for_metrics() takes those of the current batch "
    "without the samples that complete it"
)


def gather(tensor: T, *, world: World | None = None) -> T:
    """Every tensor of the tree joined over the ranks along dimension 0 (scalars become one element a rank).

    Raises:
        WorldError: the ranks' calls, structures, dtypes or shapes differ; on all ranks.
        BatchError: a leaf is not a tensor.
    """
    there = world or state.current_world()
    return _together(there, "gather", tensor, there.gather, remedy=LENGTHS)


def gather_object(object: list[T], *, world: World | None = None, every: int = 1) -> list[T]:
    """The ranks' lists of Python objects, one after the other; with `every`, of ranks 0, `every`, 2 × `every` … only.

    Raises:
        WorldError: another rank calls something else.
        BatchError: `object` is not a list or tuple.
    """
    there = world or state.current_world()
    _compare_lists(there, "gather_object", object)
    parts = there.gather_objects(object)[::every]
    return [item for part in parts for item in part]


def broadcast(tensor: T, from_process: int = 0, *, world: World | None = None) -> T:
    """Rank `from_process`'s values in every tensor of the tree.

    Raises:
        WorldError: the ranks' calls, structures, dtypes or shapes differ; on all ranks. Or `from_process` does not exist.
        BatchError: a leaf is not a tensor.
    """
    there = world or state.current_world()
    call = f"broadcast(from_process={_process(there, from_process)})"
    return _together(there, call, tensor, lambda leaf: there.broadcast(leaf, from_process))


def broadcast_object_list(
    object_list: list[T], from_process: int = 0, *, world: World | None = None
) -> list[T]:
    """Rank `from_process`'s list, filled into the given one, which is returned.

    Raises:
        WorldError: the ranks' calls or lengths of lists differ; on all ranks. Or `from_process` does not exist.
        BatchError: `object_list` is not a list.
    """
    there = world or state.current_world()
    call = f"broadcast_object_list(from_process={_process(there, from_process)})"
    facts = {"": f"a list of {len(object_list)}"} if isinstance(object_list, list) else None
    _compare_lists(there, call, object_list, facts)
    return there.broadcast_objects(object_list, from_process)


def reduce(tensor: T, reduction: Reduction = "mean", scale: float = 1.0, *, world: World | None = None) -> T:
    """Every tensor of the tree summed or averaged over the ranks, then multiplied by `scale`; ``"none"`` only scales.

    Raises:
        SettingError: a `reduction` other than sum, mean, none.
        WorldError: the ranks' calls, structures, dtypes or shapes differ; on all ranks.
        BatchError: a leaf is not a tensor.
    """
    if reduction not in get_args(Reduction):
        raise SettingError(f"reduction={reduction!r} is not one of sum, mean, none")
    there = world or state.current_world()

    def one(leaf: Tensor) -> Tensor:
        out = leaf.clone() if reduction == "none" else there.reduce(leaf, reduction)
        return out if scale == 1.0 else out * scale

    call = f"reduce(reduction={reduction!r}, scale={scale})"
    return _together(there if reduction != "none" else None, call, tensor, one)


def pad_across_processes(
    tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False, *, world: World | None = None
) -> T:
    """Every tensor of the tree as long along `dim` as the longest rank's, filled with `pad_index` (in front: `pad_first`).

    Raises:
        WorldError: the ranks' calls, structures, dtypes or other dimensions differ; on all ranks.
        BatchError: a leaf is not a tensor.
    """
    there = world or state.current_world()

    def one(leaf: Tensor) -> Tensor:
        if not -leaf.ndim <= dim < leaf.ndim:
            return leaf
        longest = int(there.reduce(torch.tensor(leaf.shape[dim], device=there.device), "max").item())
        missing = longest - leaf.shape[dim]
        if not missing:
            return leaf
        shape = list(leaf.shape)
        shape[dim] = missing
        filler = leaf.new_full(shape, pad_index)
        return torch.cat([filler, leaf] if pad_first else [leaf, filler], dim=dim)

    call = f"pad_across_processes(dim={dim}, pad_index={pad_index}, pad_first={pad_first})"
    return _together(there, call, tensor, one, free=dim, remedy=f"{ALIKE}; only dimension {dim} may differ")


def _together(
    world: World | None,
    call: str,
    tree: Any,
    one: Callable[[Tensor], Tensor],
    free: int | None = None,
    remedy: str = ALIKE,
) -> Any:
    """`tree` with ``one(leaf)`` for every leaf, once the ranks of `world` (None: only this one) have compared their trees.

    The leaves' turns follow the names of their leaf_paths, so that dicts may have their keys in another order on each rank.

    Args:
        free: a dimension that may differ in length.
    """
    found = list(leaf_paths(tree))
    if world is not None:
        world.compare(call, lambda: {place: _form(leaf, free) for place, leaf in found}, remedy=remedy)
    for place, leaf in found:
        if not isinstance(leaf, Tensor):
            raise BatchError(
                f"{call} takes nested lists, tuples and dicts of tensors, but the leaf{place and f' at {place}'} is a "
                f"{type(leaf).__name__}: pass tensors only, or gather objects with gather_object"
            )
    order = sorted(range(len(found)), key=lambda number: found[number][0])
    made = {number: one(found[number][1]) for number in order}
    results = iter(made[number] for number in range(len(found)))
    return map_leaves(lambda leaf: next(results), tree)


def _form(leaf: Any, free: int | None) -> str:
    """The part of a leaf that must be equal on all ranks: ``"float32[2, 3]"``, and the kind of device where it is not the CPU."""
    if not isinstance(leaf, Tensor):
        return f"a {type(leaf).__name__}"
    shape = [str(length) for length in leaf.shape]
    if free is not None and -leaf.ndim <= free < leaf.ndim:
        shape[free] = "*"
    where = "" if leaf.device.type == "cpu" else f" on {leaf.device.type}"
    return f"{str(leaf.dtype).removeprefix('torch.')}[{', '.join(shape)}]{where}"


def _compare_lists(world: World, call: str, given: Any, facts: dict[str, str] | None = None) -> None:
    error = ""
    if not isinstance(given, (list, tuple) if call == "gather_object" else list):
        error = f"{call} takes a list of objects, not a {type(given).__name__}: pass [object]"
    world.compare(call, lambda: facts or {}, error, "Every rank must pass a list of the same length")
    if error:
        raise BatchError(error)


def _process(world: World, number: int) -> int:
    if not 0 <= number < world.size:
        raise WorldError(
            f"from_process={number!r} is not one of the {world.size} processes, 0 … {world.size - 1}"
        )
    return number


def gather_for_metrics(data: Any, as_objects: bool, world: World, loader: Any, every: int) -> Any:
    """`Accelerator.gather_for_metrics`, of the batch of `loader` (None: none is read); `every` neighbouring ranks read the same."""
    objects = as_objects or not any(isinstance(leaf, Tensor) for leaf in leaves(data))
    error = ""
    try:
        if loader is None:
            raise BatchError(
                "gather_for_metrics() outside a loop over a prepared loader cannot know which samples are repeated: call it for "
                f"each batch inside the loop, or use {'gather_object' if as_objects else 'gather'}() for anything else"
            )
        short, usual = loader.local_size, loader.batch_size
        if not objects and short is not None and usual is not None and short < usual:
            data = recursively_apply(lambda t: t[:short] if t.ndim and t.shape[0] == usual else t, data)
        for leaf in [data] if objects else leaves(data):
            _check_batch(leaf, short, objects)
    except BatchError as trouble:
        error = str(trouble)
    if error or objects:
        world.compare("gather_for_metrics", lambda: {"": "objects"}, error)
    if error:
        raise BatchError(error)
    extra = loader.surplus
    if objects:
        whole: Any = [item for part in world.gather_objects(list(data))[::every] for item in part]
        return whole[:-extra] if extra else whole
    collect = world.gather_uneven if loader.uneven else world.gather
    free = 0 if loader.uneven else None
    whole = _together(world, "gather_for_metrics", data, lambda t: collect(t, every), free)
    return recursively_apply(lambda t: t[: t.shape[0] - extra], whole) if extra else whole


def weighted_mean(value: Any, weight: Any, world: World) -> Tensor:
    """`Accelerator.mean`."""
    values = torch.as_tensor(value, dtype=torch.float32, device=world.device).detach()
    weights = torch.as_tensor(weight, dtype=torch.float32, device=world.device).detach()
    world.compare("mean", lambda: {"the value": _form(values, None), "the weight": _form(weights, None)})
    if values.ndim or weights.ndim:
        raise BatchError(
            f"mean() takes one number and its weight a rank, not shapes {tuple(values.shape)} and {tuple(weights.shape)}: "
            "reduce them first, e.g. values.mean() with weight values.numel()"
        )
    total, count = world.reduce(torch.stack([values * weights, weights])).unbind()
    return total / count


def _check_batch(leaf: Any, size: int | None, objects: bool) -> None:
    """Dimension 0 must be the batch, or repeated samples could not be told apart."""
    tensor = isinstance(leaf, Tensor)
    scalar = not leaf.ndim if tensor else not hasattr(leaf, "__len__")
    if scalar:
        raise BatchError(
            "gather_for_metrics() got a scalar: repeated samples cannot be taken out of it. Gather one value a sample, or use "
            "mean(value, weight)"
        )
    if size is not None and len(leaf) != size:
        got = f"shape {tuple(leaf.shape)}" if tensor else f"{len(leaf)} items"
        remedy = "dimension 0 must be the batch. Reshape to one row a sample, or use gather()"
        if objects:
            remedy = "pass one item for each sample, or use gather_object()"
        raise BatchError(
            f"gather_for_metrics() got {got}, but this rank's batch has {size} samples: {remedy}"
        )
