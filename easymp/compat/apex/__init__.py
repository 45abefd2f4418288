"""NVIDIA Apex for PyTorch: ``from easymp.compat.apex import amp``, on CPUs and GPUs.

Here are `amp` (O0 to O3), `parallel` (DistributedDataParallel, Reducer, SyncBatchNorm, LARC), `optimizers` (Fused*), `normalization`
and `fp16_utils`. Not here: contrib, transformer, mlp, fused_dense, RNN, pyprof.
"""

from __future__ import annotations

from ..layer import submodules
from . import amp, fp16_utils, normalization, optimizers, parallel
from .amp.state import layer

__all__ = ["amp", "fp16_utils", "normalization", "optimizers", "parallel"]

submodules(
    __name__,
    {
        "RNN": "use torch.nn.LSTM, GRU and RNN, which O1 casts as a whole",
        "contrib": "torch has most of it: scaled_dot_product_attention, nn.GroupNorm, label smoothing in cross_entropy",
        "fused_dense": "use torch.nn.Linear under torch.compile",
        "mlp": "use torch.nn.Linear and ReLU under torch.compile",
        "pyprof": "use Accelerator.profile",
        "reparameterization": "use torch.nn.utils.parametrizations.weight_norm",
        "transformer": "use Accelerator(strategy='tensor_parallel') or strategy='pipeline'",
    },
    layer,
    "apex",
)
__getattr__ = layer.absent(
    "apex",
    {"multi_tensor_apply": "use torch._foreach_* functions; clip_grad_norm_ and optimizers here do"},
    lambda: __all__,
)
