"""Collectives over nested batches: functions of a tree, on the open run's world or a given one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import check_batch
from .errors import BatchError, SettingError
from .processes import Processes
from .state import Run, current_world
from .tree import leaves, recursively_apply
from .world import World


def gather(tensor: Any, *, world: World | None = None) -> Any:
    """Every tensor of the tree joined over the ranks along dimension 0 (scalars become one element a rank)."""
    return recursively_apply((world or current_world()).gather, tensor, error_on_other_type=True)


def gather_object(object: list[Any], *, world: World | None = None, every: int = 1) -> list[Any]:
    """The ranks' lists of Python objects, one after the other; with `every`, of ranks 0, `every`, 2 × `every` … only."""
    parts = (world or current_world()).gather_objects(object)[::every]
    return [item for part in parts for item in part]


def broadcast(tensor: Any, from_process: int = 0, *, world: World | None = None) -> Any:
    """Rank `from_process`'s values in every tensor of the tree; structure and shapes must agree over the ranks."""
    return recursively_apply((world or current_world()).broadcast, tensor, from_process, error_on_other_type=True)


def broadcast_object_list(object_list: list[Any], from_process: int = 0, *, world: World | None = None) -> list[Any]:
    """Rank `from_process`'s list, filled into the given one of the same length, which is returned."""
    return (world or current_world()).broadcast_objects(object_list, from_process)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0, *, world: World | None = None) -> Any:
    """Every tensor of the tree summed or averaged over the ranks, then multiplied by `scale`; ``"none"`` only scales.

    Raises:
        SettingError: a `reduction` other than sum, mean, none.
    """
    if reduction not in ("sum", "mean", "none"):
        raise SettingError(f"reduction={reduction!r} is not one of sum, mean, none")
    there = world or current_world()

    def one(leaf: Tensor) -> Tensor:
        out = leaf.clone() if reduction == "none" else there.reduce(leaf, reduction)
        return out if scale == 1.0 else out * scale

    return recursively_apply(one, tensor, error_on_other_type=True)


def pad_across_processes(
    tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False, *, world: World | None = None
) -> Any:
    """Every tensor of the tree as long along `dim` as the longest rank's, filled with `pad_index` (in front: `pad_first`)."""
    there = world or current_world()

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

    return recursively_apply(one, tensor, error_on_other_type=True)


class Collectives(Processes):
    """The same for whoever holds a world, and what knows of the batch being read."""

    _run: Run
    _trigger = False

    @property
    def _alike(self) -> int:
        """How many neighbouring ranks read the same batches."""
        return 1

    def gather(self, tensor: Any) -> Any:
        """Every tensor of the tree joined over the ranks along dimension 0, on all ranks."""
        return gather(tensor, world=self._world)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`, for results of the current batch: samples that only complete the last round are dropped.

        Call it inside the loop over a prepared loader. Objects that are no tensors (``use_gather_object=True``, or no tensor
        in the tree) are gathered as lists with one item a sample. Where the current batch is shorter than the others, a tensor
        of the loader's `batch_size` rows (``loss.repeat(batch_size)``: a loss that weighs as much as its samples) is cut to it.

        Raises:
            BatchError: outside a loop, or dimension 0 is not the batch.
        """
        loader = self._run.clock.reading
        if loader is None:
            raise BatchError(
                "gather_for_metrics() outside a loop over a prepared loader cannot know which samples are repeated: call it for "
                f"each batch inside the loop, or use {'gather_object' if use_gather_object else 'gather'}() for anything else"
            )
        objects = use_gather_object or not any(isinstance(leaf, Tensor) for leaf in leaves(input_data))
        short, usual = loader.local_size, loader.batch_size
        if not objects and short is not None and usual is not None and short < usual:
            input_data = recursively_apply(lambda t: t[:short] if t.ndim and t.shape[0] == usual else t, input_data)
        for leaf in [input_data] if objects else leaves(input_data):
            check_batch(leaf, loader.local_size, objects)
        if objects:
            whole = gather_object(list(input_data), world=self._world, every=self._alike)
        else:
            collect = self._world.gather_uneven if loader.uneven else self._world.gather
            whole = recursively_apply(collect, input_data, self._alike, error_on_other_type=True)
        extra = loader.surplus
        if not extra:
            return whole
        return whole[:-extra] if objects else recursively_apply(lambda t: t[: t.shape[0] - extra], whole)

    def mean(self, value: Any, weight: Any = 1.0) -> Tensor:
        """Mean of a number over the ranks, weighted: sum(value × weight) / sum(weight), 0-dim, on all ranks.

        ``accelerator.mean(loss, len(batch))`` is the mean over samples, whatever each rank's share.
        """
        values = torch.as_tensor(value, dtype=torch.float32, device=self.device).detach()
        weights = torch.as_tensor(weight, dtype=torch.float32, device=self.device).detach()
        if values.ndim or weights.ndim:
            raise BatchError(
                f"mean() takes one number and its weight a rank, not shapes {tuple(values.shape)} and {tuple(weights.shape)}: "
                "reduce them first, e.g. values.mean() with weight values.numel()"
            )
        total, count = self._world.reduce(torch.stack([values * weights, weights])).unbind()
        return total / count

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Every tensor of the tree summed ("sum") or averaged ("mean") over the ranks, times `scale`."""
        return reduce(tensor, reduction, scale, world=self._world)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Every tensor of the tree as long along `dim` as the longest rank's."""
        return pad_across_processes(tensor, dim, pad_index, pad_first, world=self._world)

    def set_trigger(self) -> None:
        """Raise a flag that `check_trigger` sees on every rank."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Whether any rank has raised the flag since the last check; lowers it. All ranks must call it together."""
        raised, self._trigger = self._world.any(self._trigger), False
        return raised
