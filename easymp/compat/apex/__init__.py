"""NVIDIA Apex for PyTorch: ``from easymp.compat.apex import amp``, on CPUs and GPUs.

Here are amp, parallel, optimizers, normalization and fp16_utils; not contrib, transformer, mlp, fused_dense, RNN and
pyprof.
"""

from __future__ import annotations

from typing import Any

from ..layer import by_name, submodules
from . import amp, fp16_utils, normalization, optimizers, parallel
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
submodules(
    __name__,
    {
        "RNN": "use torch.nn.LSTM, GRU and RNN, which O1 casts as a whole",
        "contrib": "torch has most of it: scaled_dot_product_attention, nn.GroupNorm, label smoothing in cross_entropy",
        "fp16_utils.fp16_optimizer": fp16_utils.MASTERS,
        "fp16_utils.fp16util": fp16_utils,
        "fp16_utils.loss_scaler": fp16_utils.MASTERS,
        "fused_dense": "use torch.nn.Linear under torch.compile",
        "mlp": "use torch.nn.Linear and ReLU under torch.compile",
        "multi_tensor_apply": APPLY,
        "multi_tensor_apply.multi_tensor_apply": APPLY,
        "normalization.fused_layer_norm": normalization,
        "normalization.instance_norm": "use torch.nn.InstanceNorm3d",
        **{f"optimizers.fused_{file}": {name: getattr(optimizers, name)} for name, file in OPTIMIZER_FILES.items()},
        "parallel.LARC": by_name(parallel.LARC),
        "parallel.distributed": by_name(parallel.DistributedDataParallel, parallel.Reducer),
        "parallel.multiproc": "start the script with `easymp launch --processes N script.py`",
        "parallel.optimized_sync_batchnorm": by_name(parallel.SyncBatchNorm),
        "parallel.sync_batchnorm": by_name(parallel.SyncBatchNorm),
        "pyprof": "use Accelerator.profile",
        "reparameterization": "use torch.nn.utils.parametrizations.weight_norm",
        "testing": "it is for Apex's own tests",
        "transformer": "use Accelerator(strategy='tensor_parallel') or strategy='pipeline'",
    },
    layer,
    "apex",
)
WARNINGS = dict.fromkeys(("DeprecatedFeatureWarning", "deprecated_warning"), "nothing here is deprecated")
__getattr__ = layer.absent("apex", WARNINGS, lambda: __all__)
