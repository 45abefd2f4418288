"""What torch's DTensor keeps of a world that has ended: caches that hold its meshes, and numbers that hold for the rank this process was.

To torch two meshes are equal where their shapes, names and devices are, whichever groups they have and whichever rank asks. A later
world of this process would find what an earlier one left: layouts whose mesh has that one's groups, and, where the process is another
rank now, the lengths of uneven shards that it had then. Ranks then send each other pieces of different lengths.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any


def forget_meshes() -> None:
    """Empty those caches. Some are a thread's own: what torch's threads for the backward of other devices have is out of reach."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    for clear in _clearing():
        clear()
    from torch.distributed.tensor import _random

    _random._rng_tracker = (
        None  # all ranks of the next world agree on their random numbers anew, and none of them before
    )


def _clearing() -> Iterator[Any]:
    # Imported here: half a second that runs without DTensors have no use for.
    import torch
    from torch.distributed.device_mesh import _mesh_resources
    from torch.distributed.tensor import DTensor, _collective_utils, _redistribute

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    yield propagator.propagate_op_sharding.cache.cache_clear
    yield _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear
    yield _redistribute._gen_transform_infos.cache_clear
    # Not every version of torch has these.
    for owner, name in (
        (_redistribute, "clear_redistribute_planner_cache"),
        (torch._C, "_clear_DTensor_sharding_propagator_cache"),
    ):
        clear = getattr(owner, name, None)
        if clear is not None:
            yield clear
    for name in (
        "child_to_root_mapping",
        "root_to_flatten_mapping",
        "flatten_name_to_root_dims",
    ):  # of torch 2.8
        if hasattr(_mesh_resources, name):
            yield getattr(_mesh_resources, name).clear
