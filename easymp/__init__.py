"""easymp: a thin training wrapper for PyTorch that looks at the hardware, decides precision and parallelism, and says why.

Names are loaded at first use, so that ``easymp --help`` does not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base.lazy import at_first_use
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .accelerator import Accelerator as Accelerator
    from .base.pytree import concatenate as concatenate
    from .base.pytree import find_batch_size as find_batch_size
    from .base.pytree import recursively_apply as recursively_apply
    from .base.pytree import send_to_device as send_to_device
    from .base.rng import set_seed as set_seed
    from .checkpoint.huggingface import load as load
    from .checkpoint.weights import load_weights as load_weights
    from .data import PreparedLoader as PreparedLoader
    from .data import skip_first_batches as skip_first_batches
    from .data.images import NormalizeImages as NormalizeImages
    from .distributed.processes import DistributedType as DistributedType
    from .distributed.processes import PrecisionType as PrecisionType
    from .errors import BatchError as BatchError
    from .errors import CheckpointError as CheckpointError
    from .errors import EasympError as EasympError
    from .errors import EasympWarning as EasympWarning
    from .errors import KernelError as KernelError
    from .errors import NonfiniteError as NonfiniteError
    from .errors import PrepareError as PrepareError
    from .errors import RefusedError as RefusedError
    from .errors import SettingError as SettingError
    from .errors import StepError as StepError
    from .errors import TrackerError as TrackerError
    from .errors import WorldError as WorldError
    from .hardware import Hardware as Hardware
    from .hardware import detect as detect
    from .launcher import launch as launch
    from .launcher.functions import debug_launcher as debug_launcher
    from .launcher.functions import notebook_launcher as notebook_launcher
    from .local_sgd import LocalSGD as LocalSGD
    from .logging import get_logger as get_logger
    from .logging import tqdm as tqdm
    from .options import AutocastKwargs as AutocastKwargs
    from .options import DataLoaderConfiguration as DataLoaderConfiguration
    from .options import DDPCommunicationHookType as DDPCommunicationHookType
    from .options import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from .options import GradientAccumulationPlugin as GradientAccumulationPlugin
    from .options import GradScalerKwargs as GradScalerKwargs
    from .options import InitProcessGroupKwargs as InitProcessGroupKwargs
    from .options import LoggerType as LoggerType
    from .options import ProfileKwargs as ProfileKwargs
    from .options import ProjectConfiguration as ProjectConfiguration
    from .plan import Plan as Plan
    from .plan import make_plan as make_plan
    from .protocols import Choice as Choice
    from .protocols import Source as Source
    from .protocols import Tracker as Tracker
    from .settings import Settings as Settings
    from .settings import resolve as resolve
    from .strategies.batchnorm import SyncBatchNorm as SyncBatchNorm
    from .strategies.batchnorm import convert_sync_batchnorm as convert_sync_batchnorm
    from .strategies.data_parallel import DataParallelOptions as DataParallelOptions
    from .strategies.fsdp import FSDPOptions as FSDPOptions
    from .strategies.hsdp import HSDPOptions as HSDPOptions
    from .strategies.local_sgd import LocalSGDOptions as LocalSGDOptions
    from .strategies.pipeline import PipelineOptions as PipelineOptions
    from .strategies.tensor_parallel import TensorParallelOptions as TensorParallelOptions
    from .strategies.transforms import CompileOptions as CompileOptions
    from .trackers.own import GeneralTracker as GeneralTracker
    from .training.collectives import broadcast as broadcast
    from .training.collectives import broadcast_object_list as broadcast_object_list
    from .training.collectives import gather as gather
    from .training.collectives import gather_object as gather_object
    from .training.collectives import pad_across_processes as pad_across_processes
    from .training.collectives import reduce as reduce
    from .training.oom import find_executable_batch_size as find_executable_batch_size
    from .training.oom import release_memory as release_memory
    from .training.state import AcceleratorState as AcceleratorState
    from .training.state import GradientState as GradientState
    from .training.state import PartialState as PartialState
    from .training.wrapper import forward_method as forward_method

_HOMES = {
    "accelerator": ("Accelerator",),
    "checkpoint.huggingface": ("load",),
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
            "NonfiniteError",
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
    "logging": ("get_logger", "tqdm"),
    "training.oom": ("find_executable_batch_size", "release_memory"),
    "training.collectives": (
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "pad_across_processes",
        "reduce",
    ),
    "training.wrapper": ("forward_method",),
    "plan": ("Plan", "make_plan"),
    "distributed.processes": ("DistributedType", "PrecisionType"),
    "protocols": ("Choice", "Source", "Tracker"),
    "options": (
        *("AutocastKwargs", "DataLoaderConfiguration", "DistributedDataParallelKwargs", "GradScalerKwargs"),
        *("DDPCommunicationHookType", "GradientAccumulationPlugin", "InitProcessGroupKwargs", "LoggerType"),
        *("ProfileKwargs", "ProjectConfiguration"),
    ),
    "base.rng": ("set_seed",),
    "settings": ("Settings", "resolve"),
    "local_sgd": ("LocalSGD",),
    "strategies.data_parallel": ("DataParallelOptions",),
    "strategies.local_sgd": ("LocalSGDOptions",),
    "training.state": ("AcceleratorState", "GradientState", "PartialState"),
    "strategies.batchnorm": ("SyncBatchNorm", "convert_sync_batchnorm"),
    "strategies.pipeline": ("PipelineOptions",),
    "strategies.tensor_parallel": ("TensorParallelOptions",),
    "strategies.transforms": ("CompileOptions",),
    "strategies.fsdp": ("FSDPOptions",),
    "strategies.hsdp": ("HSDPOptions",),
    "trackers.own": ("GeneralTracker",),
    "base.pytree": ("concatenate", "find_batch_size", "recursively_apply", "send_to_device"),
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
    *(
        "FullyShardedDataParallelPlugin",
        "ParallelismConfig",
        "TERecipeKwargs",
        "TorchDynamoPlugin",
        "TorchTensorParallelPlugin",
    ),
    *(
        "cpu_offload",
        "disk_offload",
        "dispatch_model",
        "infer_auto_device_map",
        "init_empty_weights",
        "init_on_device",
    ),
    *(
        "load_checkpoint_and_dispatch",
        "load_checkpoint_in_model",
        "synchronize_rng_states",
        "wait_for_everyone",
    ),
    *("extract_model_from_parallel", "is_torch_version", "patch_environment"),
)
_ELSEWHERE = dict.fromkeys(
    _ACCELERATES, "scripts for Accelerate find it, or what to write instead, in easymp.compat.accelerate"
)

__all__, __getattr__, __dir__ = at_first_use(__name__, globals(), _HOMES, elsewhere=_ELSEWHERE)
__all__ += ["__version__"]  # the very list that __dir__ gives
