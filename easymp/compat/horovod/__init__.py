"""Horovod's PyTorch interface on torch.distributed: ``import easymp.compat.horovod as hvd``.

Processes are started by `easymp launch` (in place of horovodrun), torchrun, srun or mpirun. Operations go by name, so
ranks may ask in different orders; gradients travel while backward runs. Not here: MPI as transport, the timeline, and
``hvd.elastic``.
"""

# ruff: noqa: F401 (names of __all__)
from __future__ import annotations

from typing import Any

from ...nn import SyncBatchNorm
from ..layer import submodules
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

ABSENT = dict.fromkeys(("start_timeline", "stop_timeline"), "use `Accelerator.profile`, which writes traces")
ABSENT["remove_process_set"] = "leave it out; a process set lasts until hvd.shutdown()"
for _operation in "Allreduce Allgather Broadcast Alltoall Reducescatter".split():
    names = (f"Horovod{_operation}", f"HorovodGrouped{_operation}")  # of autograd functions
    ABSENT.update(dict.fromkeys(names, "call the operation, which is differentiable"))
ELASTIC = "restart a run that failed by `easymp launch --max-restarts 3`; acc.resume() goes on at its last checkpoint"
RUN = "start the script with `easymp launch --processes N script.py`, or use easymp.notebook_launcher"
MODULES: dict[str, Any] = {
    "functions": {name: vars(optimizer)[name] for name in _functions},
    "compression": {**{name: vars(mpi_ops)[name] for name in _compressors}, "Compressor": mpi_ops.NoneCompressor},
    "sync_batch_norm": {"SyncBatchNorm": SyncBatchNorm},
    "elastic": ELASTIC,
}
submodules(__name__, MODULES, layer, "horovod.torch")
vars(mpi_ops)["__getattr__"] = layer.absent("horovod.torch.mpi_ops", ABSENT, lambda: mpi_ops.__all__)
__getattr__ = layer.absent("horovod.torch", {**ABSENT, "run": RUN}, lambda: __all__)
