"""NVIDIA Apex for PyTorch: ``from easymp.compat.apex import amp``, on CPUs and GPUs.

Here are amp, parallel, optimizers, normalization and fp16_utils; not contrib, transformer, mlp, fused_dense, RNN and
pyprof.
"""

from __future__ import annotations

from typing import Any

from ..layer import by_name
from . import amp, modules, optimizers, parallel
from .amp import ApexError, layer

__all__ = ["amp", "fp16_utils", "multi_tensor_apply", "normalization", "optimizers", "parallel"]

OPTIMIZER_FILES = {name: name.removeprefix("Fused").lower() for name in optimizers.__all__}
OPTIMIZER_FILES["FusedMixedPrecisionLamb"] = "mixed_precision_lamb"
KERNELS = "use torch._foreach_* functions; clip_grad_norm_ and optimizers here do"


class MultiTensorApply:
    """Calls of Apex's compiled kernels, which are not here; scripts choose their own fallback by `available`."""

    available = warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Any, noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> Any:
        raise ApexError(f"MultiTensorApply is not available: {KERNELS}")


APPLY = {"MultiTensorApply": MultiTensorApply, "multi_tensor_applier": MultiTensorApply(2048 * 32)}
layer.submodules(
    __name__,
    {
        "fp16_utils": modules.FP16_UTILS,
        "fp16_utils.fp16util": modules.FP16_UTILS,
        "multi_tensor_apply": APPLY,
        "multi_tensor_apply.multi_tensor_apply": APPLY,
        "normalization": modules.NORMALIZATION,
        "normalization.fused_layer_norm": modules.NORMALIZATION,
        **{f"optimizers.fused_{file}": {name: getattr(optimizers, name)} for name, file in OPTIMIZER_FILES.items()},
        "parallel.LARC": by_name(parallel.LARC),
        "parallel.distributed": by_name(parallel.DistributedDataParallel, parallel.Reducer),
        "parallel.optimized_sync_batchnorm": by_name(parallel.SyncBatchNorm),
        "parallel.sync_batchnorm": by_name(parallel.SyncBatchNorm),
    },
)
__getattr__ = layer.absent(__name__)
