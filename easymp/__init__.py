"""easymp: a thin training wrapper for PyTorch that looks at the hardware, decides precision and parallelism, and says why.

Names are loaded at first use, so that ``easymp --help`` does not wait for torch.
"""

from __future__ import annotations

from .first_use import at_first_use
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

# Names of Accelerate that are no part of this face; scripts ask for them here when only their import line has changed.
_ACCELERATES = (
    *(
        "AORecipeKwargs",
        "DeepSpeedPlugin",
        "DummyOptim",
        "DummyScheduler",
        "DynamoBackend",
        "FP8RecipeKwargs",
        "MegatronLMPlugin",
    ),
    *("FullyShardedDataParallelPlugin", "ParallelismConfig", "TERecipeKwargs", "TorchDynamoPlugin", "TorchTensorParallelPlugin"),
    *("cpu_offload", "disk_offload", "dispatch_model", "infer_auto_device_map", "init_empty_weights", "init_on_device"),
    *("load_checkpoint_and_dispatch", "load_checkpoint_in_model", "synchronize_rng_states", "wait_for_everyone"),
    *("extract_model_from_parallel", "is_torch_version", "patch_environment"),
)
_ELSEWHERE = dict.fromkeys(_ACCELERATES, "scripts for Accelerate find it, or what to write instead, in easymp.compat.accelerate")

__all__, __getattr__, __dir__ = at_first_use(__name__, globals(), _HOMES, elsewhere=_ELSEWHERE)
__all__ += ["__version__"]  # the very list that __dir__ gives
