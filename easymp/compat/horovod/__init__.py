"""Horovod's PyTorch interface on torch.distributed: ``import easymp.compat.horovod as hvd``.

Processes are started by `easymp launch` (in place of horovodrun), torchrun or srun. Operations go by name, so ranks may ask in different
orders; gradients travel while backward runs. Not here: process sets, MPI, the timeline, and sparse gradients that stay sparse.
"""

# ruff: noqa: F401 (names of __all__)
from __future__ import annotations

import torch.distributed as dist

from ...strategies.batchnorm import SyncBatchNorm
from ..layer import submodules
from . import elastic, operations
from .engine import (
    HorovodInternalError,
    NotInitializedError,
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    layer,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from .operations import *  # noqa: F403
from .optimizer import DistributedOptimizer

__all__ = [
    *operations.__all__,
    *"DistributedOptimizer HorovodInternalError NotInitializedError SyncBatchNorm cross_rank cross_size".split(),
    *"elastic gloo_built gloo_enabled init is_homogeneous is_initialized local_rank local_size".split(),
    *"mpi_built mpi_enabled mpi_threads_supported nccl_built rank shutdown size".split(),
]


def nccl_built() -> bool:
    """Whether this torch has NCCL."""
    return dist.is_available() and dist.is_nccl_available()


def gloo_built() -> bool:
    """Whether this torch has gloo, which carries CPU tensors."""
    return dist.is_available() and dist.is_gloo_available()


def mpi_built() -> bool:
    """False: torch.distributed's own backends are used."""
    return False


gloo_enabled = gloo_built
mpi_enabled = mpi_threads_supported = mpi_built

_COMPRESSION = ("Compression", "FP16Compressor", "NoneCompressor")
submodules(
    __name__,
    {"compression": {name: getattr(operations, name) for name in _COMPRESSION}},
    layer,
    "horovod.torch",
)

GROUPS = "use torch.distributed.new_group for parts of the ranks"
__getattr__ = layer.absent(
    "horovod.torch",
    {
        **dict.fromkeys(("ProcessSet", "add_process_set", "global_process_set"), GROUPS),
        **dict.fromkeys(
            ("start_timeline", "stop_timeline"), "use `Accelerator.profile`, which writes traces"
        ),
        "run": "start the script with `easymp launch --processes N script.py`, or use easymp.notebook_launcher",
        "sparse_allreduce_async": "pass sparse_as_dense=True to DistributedOptimizer",
    },
    lambda: __all__,
)
