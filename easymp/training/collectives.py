"""Collectives over nested batches.

Functions of a tree on the open run's ranks, and methods of the Accelerator on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, overload

import torch
from torch import Tensor

from ..base.lazy import modules_at_first_use
from ..base.pytree import leaf_paths, leaves, map_leaves, recursively_apply
from ..distributed.processes import Processes
from ..errors import ALIKE, BatchError, LeafError, SettingError, StepError, WorldError, without

if TYPE_CHECKING:
    from ..base.accumulation import UpdateWindow
    from ..distributed import World
    from . import state
    from .prepare import Preparation

modules_at_first_use(globals(), "state")
T = TypeVar("T")
Reduction = Literal["sum", "mean", "max", "none"]

OF_THE_RUN = "leave it out: the ranks are those of the open run"
LENGTHS = (
    f"{ALIKE}: pad_across_processes() makes tensors equally long, and gather_for_metrics() takes those of the current "
    "batch without the samples that complete it"
)


class Collectives(Processes):
    """Gathering, averaging and signalling over the ranks; a part of the Accelerator."""

    _prepared: Preparation
    _window: UpdateWindow
    _trigger: bool

    def gather(self, tensor: T) -> T:
        """Join tensors of all ranks: `easymp.gather` on this run's ranks, with the same errors.

        Args:
            tensor: as there.

        Returns:
            The joined tensors, on all ranks.

        Example:
            >>> acc.gather(torch.ones(2, 3)).shape  # one rank
            torch.Size([2, 3])
        """
        return gather(tensor, world=self._world)

    @overload
    def gather_for_metrics(self, input_data: T, use_gather_object: Literal[False] = False) -> T: ...

    @overload
    def gather_for_metrics(self, input_data: Iterable[T], use_gather_object: Literal[True]) -> list[T]: ...

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Join the results of the current batch over the ranks, without the samples that only complete the last round.

        Call it inside the loop over a prepared loader. Where the current batch is shorter than the others, a tensor of
        the loader's `batch_size` rows (``loss.repeat(batch_size)``: a loss that weighs as much as its samples) is cut
        to it.

        Args:
            input_data: tensors with one row a sample, nested in any way; or any objects, one item a sample.
            use_gather_object: gather the items as Python objects; so are structures without a tensor.

        Returns:
            The same structure with the rows of all samples of the global batch; a list of objects.

        Raises:
            BatchError: outside a loop, or dimension 0 is not the batch.
            StepError: under `context_parallel`, where each rank has a part of each sequence.
            WorldError: the ranks' calls, structures or dtypes differ; on all ranks.

        Example:
            >>> loader = acc.prepare(torch.utils.data.DataLoader(range(5), batch_size=2))
            >>> [acc.gather_for_metrics(batch).tolist() for batch in loader]
            [[0, 1], [2, 3], [4]]
        """
        world, loader = self._world, self._window.reading
        neighbours = world.size // self._prepared.strategy.data_size  # so many neighbours read the same
        if self._prepared.strategy.context_size > 1:
            raise StepError(
                "gather_for_metrics() under context_parallel, where each process has a part of each sequence: add up "
                "sums and counts of tokens with reduce()"
            )
        objects = use_gather_object or not any(isinstance(leaf, Tensor) for leaf in leaves(input_data))
        error = ""
        try:
            if loader is None:
                raise BatchError(
                    "gather_for_metrics() outside a loop over a prepared loader cannot know which samples are "
                    "repeated: call it for each batch inside the loop, or use "
                    f"{'gather_object' if use_gather_object else 'gather'}() for anything else"
                )
            samples, batch_size = loader.local_size, loader.batch_size
            if not objects and samples is not None and batch_size is not None and samples < batch_size:
                cut = lambda t: t[:samples] if t.ndim and t.shape[0] == batch_size else t  # noqa: E731
                input_data = recursively_apply(cut, input_data)
            for leaf in [input_data] if objects else leaves(input_data):
                _check_batch(leaf, samples, objects)
        except BatchError as batch_error:
            error = str(batch_error)
        if error or objects:
            world.compare("gather_for_metrics", lambda: {"": "objects"}, error)
        if error:
            raise BatchError(error)
        extra = loader.surplus
        if objects:
            gathered: Any = [item for part in world.gather_objects(list(input_data))[::neighbours] for item in part]
            return gathered[:-extra] if extra else gathered
        collect = world.gather_uneven if loader.uneven else world.gather
        free = 0 if loader.uneven else None
        gathered = _together(world, "gather_for_metrics", input_data, lambda t: collect(t, neighbours), free)
        return recursively_apply(lambda t: t[: t.shape[0] - extra], gathered) if extra else gathered

    def mean(self, value: Tensor | float, weight: Tensor | float = 1.0) -> Tensor:
        """Weighted mean of one number a rank: sum(value × weight) / sum(weight).

        ``acc.mean(loss, len(batch))`` is the mean over samples, also where ranks have batches of different sizes.

        Args:
            value: a number or 0-dim tensor.
            weight: a number or 0-dim tensor.

        Returns:
            The mean in fp32, 0-dim, on all ranks.

        Raises:
            BatchError: a tensor with dimensions.

        Example:
            >>> acc.mean(0.25, weight=32)
            tensor(0.2500)
        """
        world = self._world
        values = torch.as_tensor(value, dtype=torch.float32, device=world.device).detach()
        weights = torch.as_tensor(weight, dtype=torch.float32, device=world.device).detach()
        world.compare("mean", lambda: {"the value": _form(values, None), "the weight": _form(weights, None)})
        if values.ndim or weights.ndim:
            raise BatchError(
                f"mean() takes one number and its weight a rank, not shapes {tuple(values.shape)} and "
                f"{tuple(weights.shape)}: reduce them first, e.g. values.mean() with weight values.numel()"
            )
        total, count = world.reduce(torch.stack([values * weights, weights])).unbind()
        return total / count

    def reduce(self, tensor: T, reduction: Reduction = "sum", scale: float = 1.0) -> T:
        """Sum or average tensors over the ranks: `easymp.reduce` on this run's ranks, with another default.

        Args:
            tensor: as there.
            reduction: as there.
            scale: as there.

        Returns:
            The results, on all ranks.

        Example:
            >>> acc.reduce({"correct": torch.tensor(7)})  # one rank
            {'correct': tensor(7)}
        """
        return reduce(tensor, reduction, scale, world=self._world)

    def pad_across_processes(self, tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
        """Pad tensors to the length of the longest rank's: `easymp.pad_across_processes` on this run's ranks.

        Args:
            tensor: as there.
            dim: as there.
            pad_index: as there.
            pad_first: as there.

        Returns:
            Tensors of one shape on all ranks.

        Example:
            >>> acc.pad_across_processes(torch.ones(2, 5), dim=1).shape  # one rank
            torch.Size([2, 5])
        """
        return pad_across_processes(tensor, dim, pad_index, pad_first, world=self._world)

    def set_trigger(self) -> None:
        """Raise a flag on this rank that `check_trigger` sees on every rank.

        Example:
            >>> acc.set_trigger()
            >>> acc.check_trigger(), acc.check_trigger()
            (True, False)
        """
        self._trigger = True

    def check_trigger(self) -> bool:
        """Ask whether any rank raised the flag, and lower it. All ranks call it together.

        Returns:
            Whether any rank has called `set_trigger` since the last check.

        Raises:
            WorldError: another rank calls something else.

        Example:
            >>> acc.check_trigger()  # for example: stop early if any rank found a reason
            False
        """
        self._world.compare("check_trigger")
        raised, self._trigger = self._world.any(self._trigger), False
        return raised


def gather(tensor: T, *, world: World | None = None) -> T:
    """Join tensors of all ranks.

    Args:
        tensor: tensors of one dtype and shape on all ranks, nested in any way; scalars become one element a rank.
        world: the ranks; by default those of the open run.

    Returns:
        The same structure, each tensor joined along dimension 0 in rank order, on all ranks.

    Raises:
        WorldError: the ranks' calls, structures, dtypes or shapes differ; on all ranks.
        BatchError: a leaf is not a tensor (a TypeError, too).

    Example:
        >>> gather({"loss": torch.tensor(0.5)})  # one rank
        {'loss': tensor([0.5000])}
    """
    run_world = world or state.current_world()
    return _together(run_world, "gather", tensor, run_world.gather, remedy=LENGTHS)


@without(world=OF_THE_RUN, every="gather [object], and take every n-th list of the result")
def gather_object(object: list[T]) -> list[T]:
    """Join the ranks' lists of Python objects.

    Args:
        object: a list of objects that can be pickled.

    Returns:
        One list in rank order, on all ranks.

    Raises:
        WorldError: another rank calls something else.
        BatchError: `object` is not a list or tuple.

    Example:
        >>> gather_object([f"rank {acc.process_index}"])
        ['rank 0']
    """
    world = state.current_world()
    _compare_lists(world, "gather_object", object)
    return [item for part in world.gather_objects(object) for item in part]


@without(world=OF_THE_RUN)
def broadcast(tensor: T, from_process: int = 0) -> T:
    """Copy the tensors of one rank to all ranks.

    Args:
        tensor: tensors of one dtype and shape on all ranks, nested in any way.
        from_process: the rank whose values are taken.

    Returns:
        The same structure with that rank's values.

    Raises:
        WorldError: the ranks' calls, structures, dtypes or shapes differ; on all ranks. Or `from_process` does not
            exist.
        BatchError: a leaf is not a tensor (a TypeError, too).

    Example:
        >>> broadcast(torch.arange(3) + acc.process_index)  # rank 0's
        tensor([0, 1, 2])
    """
    world = state.current_world()
    call = f"broadcast(from_process={_process(world, from_process)})"
    return _together(world, call, tensor, lambda leaf: world.broadcast(leaf, from_process))


@without(world=OF_THE_RUN)
def broadcast_object_list(object_list: list[T], from_process: int = 0) -> list[T]:
    """Copy a list of Python objects from one rank to all ranks.

    Args:
        object_list: filled in place; as long on all ranks.
        from_process: the rank whose objects are taken.

    Returns:
        `object_list`.

    Raises:
        WorldError: the ranks' calls or lengths of lists differ; on all ranks. Or `from_process` does not exist.
        BatchError: `object_list` is not a list.

    Example:
        >>> broadcast_object_list(["runs/a" if acc.is_main_process else None])
        ['runs/a']
    """
    world = state.current_world()
    call = f"broadcast_object_list(from_process={_process(world, from_process)})"
    facts = {"": f"a list of {len(object_list)}"} if isinstance(object_list, list) else None
    _compare_lists(world, call, object_list, facts)
    return world.broadcast_objects(object_list, from_process)


def reduce(tensor: T, reduction: Reduction = "mean", scale: float = 1.0, *, world: World | None = None) -> T:
    """Sum or average tensors over the ranks, or take the largest values.

    Args:
        tensor: tensors of one dtype and shape on all ranks, nested in any way.
        reduction: "none" leaves each rank its own values.
        scale: multiplies the result.
        world: the ranks; by default those of the open run.

    Returns:
        The same structure with the results, on all ranks.

    Raises:
        SettingError: an unknown `reduction`.
        WorldError: the ranks' calls, structures, dtypes or shapes differ; on all ranks.
        BatchError: a leaf is not a tensor (a TypeError, too).

    Example:
        >>> reduce(torch.ones(2), "sum", scale=0.5)  # one rank
        tensor([0.5000, 0.5000])
    """
    if reduction not in get_args(Reduction):
        raise SettingError(f"reduction={reduction!r} is not one of sum, mean, max, none")
    run_world = world or state.current_world()

    def one(leaf: Tensor) -> Tensor:
        reduced = leaf.clone() if reduction == "none" else run_world.reduce(leaf, reduction)
        return reduced if scale == 1.0 else reduced * scale

    call = f"reduce(reduction={reduction!r}, scale={scale})"
    return _together(run_world if reduction != "none" else None, call, tensor, one)


def pad_across_processes(
    tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False, *, world: World | None = None
) -> T:
    """Pad tensors to the length of the longest rank's.

    Args:
        tensor: tensors of one dtype on all ranks, nested in any way; only dimension `dim` may differ in length.
        dim: tensors without this dimension stay as they are.
        pad_index: the value to fill with.
        pad_first: fill in front.
        world: the ranks; by default those of the open run.

    Returns:
        The same structure with tensors of one shape on all ranks.

    Raises:
        WorldError: the ranks' calls, structures, dtypes or other dimensions differ; on all ranks.
        BatchError: a leaf is not a tensor (a TypeError, too).

    Example:
        >>> tokens = torch.ones(2, 3 + acc.process_index)
        >>> gather(pad_across_processes(tokens, dim=1)).shape  # one rank
        torch.Size([2, 3])
    """
    run_world = world or state.current_world()

    def one(leaf: Tensor) -> Tensor:
        if not -leaf.ndim <= dim < leaf.ndim:
            return leaf
        longest = int(run_world.reduce(torch.tensor(leaf.shape[dim], device=run_world.device), "max").item())
        missing = longest - leaf.shape[dim]
        if not missing:
            return leaf
        shape = list(leaf.shape)
        shape[dim] = missing
        filler = leaf.new_full(shape, pad_index)
        return torch.cat([filler, leaf] if pad_first else [leaf, filler], dim=dim)

    call = f"pad_across_processes(dim={dim}, pad_index={pad_index}, pad_first={pad_first})"
    return _together(run_world, call, tensor, one, free=dim, remedy=f"{ALIKE}; only dimension {dim} may differ")


def _together(
    world: World | None,
    call: str,
    tree: T,
    one: Callable[[Tensor], Tensor],
    free: int | None = None,
    remedy: str = ALIKE,
) -> T:
    """Apply `one` to every leaf of `tree`, after the ranks of `world` (None: only this one) have compared their trees.

    `free` is the dimension whose size may differ between ranks. The order of a dict's keys may differ, too: leaves are
    visited in the order of their paths.
    """
    tensors = list(leaf_paths(tree))
    if world is not None:
        world.compare(call, lambda: {path: _form(leaf, free) for path, leaf in tensors}, remedy=remedy)
    for path, leaf in tensors:
        if not isinstance(leaf, Tensor):
            raise LeafError(
                f"{call} takes nested lists, tuples and dicts of tensors, but the leaf{path and f' at {path}'} is a "
                f"{type(leaf).__name__}: pass tensors only, or gather objects with gather_object"
            )
    results = {path: one(leaf) for path, leaf in sorted(tensors, key=lambda pair: pair[0])}
    paths = iter([path for path, _ in tensors])
    mapped: T = map_leaves(lambda leaf: results[next(paths)], tree)
    return mapped


def _form(leaf: Any, free: int | None) -> str:
    """Dtype, shape and device of a leaf as text, for example ``"float32[2, *] on cuda"``; dimension `free` is ``*``."""
    if not isinstance(leaf, Tensor):
        return f"a {type(leaf).__name__}"
    shape = [str(length) for length in leaf.shape]
    if free is not None and -leaf.ndim <= free < leaf.ndim:
        shape[free] = "*"
    path = "" if leaf.device.type == "cpu" else f" on {leaf.device.type}"
    return f"{str(leaf.dtype).removeprefix('torch.')}[{', '.join(shape)}]{path}"


def _compare_lists(world: World, call: str, given: Any, facts: dict[str, str] | None = None) -> None:
    error = ""
    if not isinstance(given, (list, tuple) if call == "gather_object" else list):
        error = f"{call} takes a list of objects, not a {type(given).__name__}: pass [object]"
    world.compare(call, lambda: facts or {}, error, "Every rank must pass a list of the same length")
    if error:
        raise BatchError(error)


def _process(world: World, number: int) -> int:
    if not 0 <= number < world.size:
        message = f"is not one of the {world.size} processes, 0 … {world.size - 1}"
        raise WorldError(f"from_process={number!r} {message}")
    return number


def _check_batch(leaf: Any, size: int | None, objects: bool) -> None:
    """Check that dimension 0 is the batch, since repeated samples are removed along it."""
    tensor = isinstance(leaf, Tensor)
    if not leaf.ndim if tensor else not hasattr(leaf, "__len__"):
        raise BatchError(
            "gather_for_metrics() got a scalar: repeated samples cannot be taken out of it. Gather one value a sample, "
            "or use mean(value, weight)"
        )
    if size is not None and len(leaf) != size:
        got = f"shape {tuple(leaf.shape)}" if tensor else f"{len(leaf)} items"
        remedy = "dimension 0 must be the batch. Reshape to one row a sample, or use gather()"
        if objects:
            remedy = "pass one item for each sample, or use gather_object()"
        batch = f"this rank's batch has {size} samples"
        raise BatchError(f"gather_for_metrics() got {got}, but {batch}: {remedy}")
