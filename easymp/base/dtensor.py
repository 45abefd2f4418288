"""The part of a tensor that lies on this rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """The shard of a DTensor, sharing its memory; any other tensor itself.

    What is done element by element needs no more, and on shards it costs no dispatch through DTensor and works in one list with
    plain tensors. DTensor is known by its method, for importing its class costs more than most runs have use for.
    """
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    here = to_local()
    # What a collective has not yet been waited for has no memory of its own.
    arrived = getattr(here, "trigger_wait", None)
    return here if arrived is None else arrived()


def parts(tensors: list[Tensor]) -> list[Tensor]:
    """`local` of each; for lists that are looked through at each step, at a small part of its cost."""
    return tensors if _PLAIN.issuperset(map(type, tensors)) else [_part(tensor) for tensor in tensors]


_PLAIN = {Tensor, torch.nn.Parameter}


def _part(tensor: Tensor) -> Tensor:
    # What `to_local` gives, without autograd's view: private, but 10 ns against microseconds.
    here = getattr(tensor, "_local_tensor", None)
    return here if type(here) is Tensor else local(tensor)


def add_up(tensors: Sequence[Tensor], totals: Tensor) -> None:
    """Make sums over the local parts of `tensors`, a row of `totals` each, sums over the whole ones, in place.

    Of DTensors that are sharded, a collective on their mesh: one a mesh dimension, for all rows at once. Nothing for others.
    """
    rows: dict[tuple[Any, int], list[int]] = {}
    for row, tensor in enumerate(tensors):
        for dim, placement in enumerate(getattr(tensor, "placements", ())):
            if not placement.is_replicate():  # torch's _StridedShard is none of its Shards in all versions
                rows.setdefault((tensor.device_mesh, dim), []).append(row)  # type: ignore[attr-defined]
    for (mesh, dim), which in rows.items():
        mine = totals if len(which) == len(totals) else totals[which]
        torch.distributed.all_reduce(mine, group=mesh.get_group(dim))
        if mine is not totals:
            totals[which] = mine


def meshes(tensors: Iterable[Tensor]) -> list[Any]:
    """The device meshes that DTensors among `tensors` lie on."""
    return list(dict.fromkeys(t.device_mesh for t in tensors if hasattr(t, "to_local")))  # type: ignore[attr-defined]


def dense(tensor: Tensor) -> bool:
    """Whether `tensor` fills a run of memory, each number once, in any order of its dimensions."""
    if tensor.is_contiguous() or not tensor.numel():
        return True
    end = 1
    for stride, count in sorted((s, c) for s, c in zip(tensor.stride(), tensor.shape) if c > 1):
        if stride != end:
            return False
        end *= count
    return True
