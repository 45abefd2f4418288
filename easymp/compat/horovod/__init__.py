"""Horovod's PyTorch interface on torch.distributed: ``import easymp.compat.horovod as hvd``.

Processes are started by `easymp launch` (in place of horovodrun), torchrun, srun or mpirun. Operations go by name, so ranks may ask in
different orders; gradients travel while backward runs. Not here: MPI as transport, and the timeline.
"""

# ruff: noqa: F401 (names of __all__)
from __future__ import annotations

from ...strategies.batchnorm import SyncBatchNorm
from ..layer import submodules
from . import elastic, mpi_ops
from .basics import layer
from .functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .mpi_ops import *  # noqa: F403
from .optimizer import DistributedOptimizer

__all__ = [
    *mpi_ops.__all__,
    *"DistributedOptimizer SyncBatchNorm allgather_object broadcast_object broadcast_optimizer_state".split(),
    *"broadcast_parameters elastic".split(),
]

TIMELINE = dict.fromkeys(
    ("start_timeline", "stop_timeline"), "use `Accelerator.profile`, which writes traces"
)
HANDLERS = "give the object state_dict and load_state_dict, by which TorchState keeps it"
_named = {n: vars(mpi_ops)[n] for n in ("Compression", "FP16Compressor", "NoneCompressor")}
submodules(
    __name__,
    {
        "compression": {**_named, "Compressor": mpi_ops.NoneCompressor},
        "sync_batch_norm": {"SyncBatchNorm": SyncBatchNorm},
        "elastic.sampler": {"ElasticSampler": elastic.ElasticSampler},
        "elastic.state": {
            "TorchState": elastic.TorchState,
            "absent": dict.fromkeys(
                [
                    *(f"{kind}StateHandler" for kind in ("Model", "Optimizer", "Sampler")),
                    *("StateHandler", "get_handler_registry", "set_handler_registry"),
                ],
                HANDLERS,
            ),
        },
    },
    layer,
    "horovod.torch",
)
_operations = ("Allreduce", "Allgather", "Broadcast", "Alltoall", "Reducescatter")
_functions = [f"Horovod{group}{n}" for n in _operations for group in ("", "Grouped")]
vars(mpi_ops)["__getattr__"] = layer.absent(
    "horovod.torch.mpi_ops",
    {**TIMELINE, **dict.fromkeys(_functions, "call the operation, which is differentiable")},
    lambda: mpi_ops.__all__,
)
__getattr__ = layer.absent(
    "horovod.torch",
    {
        **TIMELINE,
        "run": "start the script with `easymp launch --processes N script.py`, or use easymp.notebook_launcher",
    },
    lambda: __all__,
)
