"""Lightning Fabric's interface: ``from easymp.compat.lightning_fabric import Fabric``, or ``import easymp.compat.lightning_fabric as L``.

The precisions and strategies are easymp's under Fabric's names, and checkpoints are easymp's. Gradients are averaged at each backward
outside of `no_backward_sync`, and accumulation is the script's own, as in Fabric. Not here: TPUs, DeepSpeed as a strategy, plugins,
double precision, quantization.
"""

from __future__ import annotations

from ...base.pytree import send_to_device
from ...training.state import accelerators
from ..layer import submodules
from .choices import DDPStrategy, FSDPStrategy, Strategy, layer, seed_everything
from .csv_logs import CSVLogger, rank_zero_info, rank_zero_only, rank_zero_warn
from .fabric import Fabric

__all__ = ["Fabric", "is_wrapped", "seed_everything"]


def is_wrapped(obj: object) -> bool:
    """Whether `obj` came from a setup method."""
    prepared = (view for acc in accelerators() for view in acc._views())  # a model may stay the given one
    own = type(obj).__module__.startswith("easymp.") or type(obj).__name__.startswith("Prepared")
    return own or any(obj is view for view in prepared)


ITS_OWN = "pass loggers='tensorboard', 'wandb', 'jsonl' …, or an object of Lightning's loggers"
ACCELERATORS = "pass accelerator='cpu', 'gpu' or 'auto'"
PRECISIONS = "pass precision='bf16-mixed' and its kind; easymp joins the launcher and writes its own files"
PLAIN = "pass strategy='auto', 'ddp', 'fsdp' or 'dp'"
RANK_ZERO = (rank_zero_info, rank_zero_only, rank_zero_warn)
UTILITIES = dict(zip(("rank_zero_info", "rank_zero_only", "rank_zero_warn"), RANK_ZERO))
SPEED = "use Accelerator.profile, or log_with='console'"
THROUGHPUT = dict.fromkeys(("Throughput", "ThroughputMonitor", "measure_flops"), SPEED)
submodules(
    __name__,
    {
        "accelerators": ACCELERATORS,
        "loggers": {
            "CSVLogger": CSVLogger,
            "absent": dict.fromkeys(("TensorBoardLogger", "Logger"), ITS_OWN),
        },
        "plugins": PRECISIONS,
        "strategies": {
            "DDPStrategy": DDPStrategy,
            "FSDPStrategy": FSDPStrategy,
            "Strategy": Strategy,
            "absent": {
                "DeepSpeedStrategy": "pass strategy='fsdp', or use easymp.compat.deepspeed",
                "ModelParallelStrategy": "use easymp.Accelerator(strategy='tensor_parallel')",
                **dict.fromkeys(("DataParallelStrategy", "ParallelStrategy", "SingleDeviceStrategy"), PLAIN),
            },
        },
        "utilities": {
            **UTILITIES,
            "move_data_to_device": send_to_device,
            "absent": {**THROUGHPUT, "AttributeDict": "use types.SimpleNamespace, or a dict"},
        },
        "utilities.rank_zero": UTILITIES,
        "utilities.seed": {"seed_everything": seed_everything},
        "utilities.throughput": {"absent": THROUGHPUT},
        "wrappers": {"is_wrapped": is_wrapped},
    },
    layer,
    "lightning_fabric",
)
__getattr__ = layer.absent("lightning_fabric", {}, lambda: __all__)
