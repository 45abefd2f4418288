"""easymp: a thin training wrapper for PyTorch that looks at the hardware, decides precision and parallelism, and says why.

Names are loaded at first use, so that ``easymp --help`` does not wait for torch.
"""

from __future__ import annotations

import gc
import importlib
from typing import Any

from .version import __version__ as __version__

_HOMES = {
    "accelerator": ("Accelerator",),
    "checkpoint.single": ("load",),
    "checkpoint.weights": ("load_weights",),
    "data": ("PreparedLoader", "skip_first_batches"),
    "data.images": ("NormalizeImages",),
    "errors": (
        *(
            "BatchError",
            "CheckpointError",
            "EasympError",
            "EasympWarning",
            "KernelError",
            "PrepareError",
            "RefusedError",
            "SettingError",
            "StepError",
            "TrackerError",
            "WorldError",
        ),
    ),
    "hardware": ("Hardware", "detect"),
    "launcher": ("launch",),
    "launcher.functions": ("debug_launcher", "notebook_launcher"),
    "log": ("get_logger", "tqdm"),
    "memory_retry": ("find_executable_batch_size", "release_memory"),
    "operations": ("broadcast", "broadcast_object_list", "gather", "gather_object", "pad_across_processes", "reduce"),
    "plan": ("Plan", "make_plan"),
    "processes": ("DistributedType", "PrecisionType"),
    "protocols": ("Choice", "Source", "Tracker"),
    "records": (
        *("AutocastKwargs", "DataLoaderConfiguration", "DistributedDataParallelKwargs", "GradScalerKwargs"),
        *("DDPCommunicationHookType", "GradientAccumulationPlugin", "InitProcessGroupKwargs", "LoggerType"),
        *("ProfileKwargs", "ProjectConfiguration"),
    ),
    "rng": ("set_seed",),
    "settings": ("Settings", "resolve"),
    "local_sgd": ("LocalSGD",),
    "strategies.data_parallel": ("DataParallelOptions",),
    "strategies.local_sgd": ("LocalSGDOptions",),
    "state": ("AcceleratorState", "GradientState", "PartialState"),
    "strategies.batchnorm": ("SyncBatchNorm", "convert_sync_batchnorm"),
    "strategies.pipeline": ("PipelineOptions",),
    "strategies.tensor_parallel": ("TensorParallelOptions",),
    "strategies.compiling": ("CompileOptions",),
    "strategies.fsdp": ("FSDPOptions",),
    "strategies.hsdp": ("HSDPOptions",),
    "trackers.own": ("GeneralTracker",),
    "tree": ("concatenate", "find_batch_size", "recursively_apply", "send_to_device"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'easymp' has no attribute {name!r}")
    value = getattr(_load(f".{_HOME[name]}"), name)
    globals()[name] = value
    return value


def _load(home: str) -> Any:
    """A module of ours, with the garbage collector off: what an import makes stays, and a collection would look through all of torch."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(home, __name__)
    finally:
        if collects:
            gc.enable()


def __dir__() -> list[str]:
    return __all__
