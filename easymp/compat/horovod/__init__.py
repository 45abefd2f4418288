"""Horovod's PyTorch interface on torch.distributed: ``import easymp.compat.horovod as hvd``.

Processes are started by `easymp launch` (in place of horovodrun), torchrun, srun or mpirun. Operations go by name, so
ranks may ask in different orders; gradients travel while backward runs. Not here: MPI as transport, the timeline, and
``hvd.elastic``.
"""

from __future__ import annotations

from ...nn import SyncBatchNorm
from ..layer import by_name
from . import mpi_ops
from .mpi_ops import *  # noqa: F403
from .mpi_ops import FP16Compressor, NoneCompressor, layer
from .optimizer import (
    DistributedOptimizer,
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

FUNCTIONS = by_name(allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters)
__all__ = [*mpi_ops.__all__, *FUNCTIONS, "DistributedOptimizer", "SyncBatchNorm"]
layer.submodules(
    __name__,
    {
        "functions": FUNCTIONS,
        "compression": by_name(mpi_ops.Compression, FP16Compressor, NoneCompressor, Compressor=NoneCompressor),
        "sync_batch_norm": by_name(SyncBatchNorm),
    },
)
__getattr__ = layer.absent(__name__)
