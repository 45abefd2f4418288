"""``deepspeed.comm``: torch.distributed under DeepSpeed's name, with `init_distributed`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ...distributed import World, locate, read_ranks
from ...errors import RefusedError
from ..layer import device_of
from .config import layer

_world: World | None = None


def init_distributed(
    dist_backend: str | None = None, auto_mpi_discovery: bool = True, distributed_port: int = 29500, verbose: bool = True,
    timeout: Any = None, init_method: str | None = None, dist_init_required: bool | None = None, config: Any = None, rank: int = -1,
    world_size: int = -1,
) -> None:  # fmt: skip
    """Join the processes that a launcher announced; a process alone is a group of one. A group that runs is kept."""
    global _world
    if init_method or rank >= 0 or world_size > 0:
        raise RefusedError("init_distributed(init_method=…, rank=…, world_size=…): the launcher says them")
    if dist_backend not in (None, "nccl", "gloo"):
        layer.ignore({"init_distributed(dist_backend)": "NCCL on GPUs, gloo elsewhere"})
    if dist.is_initialized() or dist_init_required is False:
        return
    ranks = read_ranks()
    if ranks.announced:
        seconds = timeout.total_seconds() if hasattr(timeout, "total_seconds") else 120.0
        ranks = locate(ranks, seconds)
        _world = World(ranks, device_of(ranks), seconds)
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)


def get_rank(group: Any = None) -> int:
    """Rank of this process."""
    return dist.get_rank(group) if dist.is_initialized() else read_ranks().rank


def get_world_size(group: Any = None) -> int:
    """Number of processes."""
    return dist.get_world_size(group) if dist.is_initialized() else read_ranks().size


def get_local_rank() -> int:
    """Rank of this process on its node."""
    return read_ranks().local_rank


def log_summary(*args: Any, **kwargs: Any) -> None:
    """Do nothing: `Accelerator.profile` shows the time of communication."""


def destroy_process_group(group: Any = None) -> None:
    """Leave the group."""
    global _world
    if _world is not None and group is None:
        _world.close()
        _world = None
    elif dist.is_initialized():
        dist.destroy_process_group(group)


def __getattr__(name: str) -> Any:
    """Every other name is torch.distributed's: all_reduce, broadcast, barrier, ReduceOp and so on."""
    return getattr(dist, name)
