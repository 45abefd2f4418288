"""Lightning Fabric's interface: ``from easymp.compat.lightning_fabric import Fabric``, or ``import easymp.compat.lightning_fabric as L``.

The precisions and strategies are easymp's under Fabric's names, and checkpoints are easymp's. Gradients are averaged at each backward
outside of `no_backward_sync`, and accumulation is the script's own, as in Fabric. Not here: TPUs, DeepSpeed as a strategy, plugins,
double precision, quantization.
"""

from __future__ import annotations

from ...training.state import accelerators
from ..layer import submodules
from .choices import DDPStrategy, FSDPStrategy, layer, seed_everything
from .fabric import Fabric

__all__ = ["Fabric", "is_wrapped", "seed_everything"]


def is_wrapped(obj: object) -> bool:
    """Whether `obj` came from a setup method."""
    prepared = (view for acc in accelerators() for view in acc._views())  # a model may stay the given one
    own = type(obj).__module__.startswith("easymp.") or type(obj).__name__.startswith("Prepared")
    return own or any(obj is view for view in prepared)


ITS_OWN = "pass loggers='tensorboard', 'wandb', 'jsonl' …, or an object of Lightning's loggers"
submodules(
    __name__,
    {
        "loggers": {"absent": dict.fromkeys(("CSVLogger", "TensorBoardLogger", "Logger"), ITS_OWN)},
        "strategies": {
            "DDPStrategy": DDPStrategy,
            "FSDPStrategy": FSDPStrategy,
            "absent": {
                "DeepSpeedStrategy": "pass strategy='fsdp', or use easymp.compat.deepspeed",
                "ModelParallelStrategy": "use easymp.Accelerator(strategy='tensor_parallel')",
            },
        },
    },
    layer,
    "lightning_fabric",
)
__getattr__ = layer.absent("lightning_fabric", {}, lambda: __all__)
