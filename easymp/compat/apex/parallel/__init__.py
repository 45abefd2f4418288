"""``apex.parallel``: DistributedDataParallel by Apex's options, Reducer, batch-norm over the ranks, LARC. On CPUs (gloo) and GPUs.

The script itself calls torch.distributed.init_process_group, and `easymp launch` or torchrun starts its processes, in place of
``python -m apex.parallel.multiproc``.
"""

from __future__ import annotations

from ..saying import layer
from .batchnorm import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group
from .larc import LARC
from .reducing import DistributedDataParallel, Reducer

__all__ = [
    "LARC",
    "DistributedDataParallel",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]

__getattr__ = layer.absent(
    "apex.parallel",
    {
        "multiproc": "start the script with `easymp launch --processes N script.py`",
        "ReduceOp": "use torch.distributed.ReduceOp",
    },
    lambda: __all__,
)
