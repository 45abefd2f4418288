"""Horovod's PyTorch interface on torch.distributed: ``import easymp.compat.horovod as hvd``.

Processes are started by `easymp launch` (in place of horovodrun), torchrun, srun or mpirun. Operations go by name, so
ranks may ask in different orders; gradients travel while backward runs. Not here: MPI as transport, the timeline, and
``hvd.elastic``.
"""

# ruff: noqa: F401 (names of __all__)
from __future__ import annotations

from ...nn import SyncBatchNorm
from . import mpi_ops, optimizer
from .basics import layer
from .mpi_ops import *  # noqa: F403
from .optimizer import (
    DistributedOptimizer,
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

_functions = "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters".split()
_compressors = "Compression FP16Compressor NoneCompressor".split()
__all__ = [*mpi_ops.__all__, *_functions, "DistributedOptimizer", "SyncBatchNorm"]

layer.submodules(
    __name__,
    {
        "functions": {name: vars(optimizer)[name] for name in _functions},
        "compression": {**{name: vars(mpi_ops)[name] for name in _compressors}, "Compressor": mpi_ops.NoneCompressor},
        "sync_batch_norm": {"SyncBatchNorm": SyncBatchNorm},
    },
)
vars(mpi_ops)["__getattr__"] = layer.absent(mpi_ops.__name__, lambda: mpi_ops.__all__)
__getattr__ = layer.absent(__name__, lambda: __all__)
