"""easymp: a thin training wrapper for PyTorch that reads the hardware, decides precision and parallelism, and says why.

Names are loaded at first use, so that ``easymp --help`` does not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base.lazy import at_first_use
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .accelerator import Accelerator as Accelerator
    from .base.parts import Part as Part
    from .base.pytree import concatenate as concatenate
    from .base.pytree import find_batch_size as find_batch_size
    from .base.pytree import recursively_apply as recursively_apply
    from .base.pytree import send_to_device as send_to_device
    from .base.rng import set_seed as set_seed
    from .checkpoint.export import load as load
    from .checkpoint.weights import load_weights as load_weights
    from .data import PreparedLoader as PreparedLoader
    from .data import skip_first_batches as skip_first_batches
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
    from .launcher.entrypoints import debug_launcher as debug_launcher
    from .launcher.entrypoints import notebook_launcher as notebook_launcher
    from .logging import get_logger as get_logger
    from .logging import tqdm as tqdm
    from .nn import SyncBatchNorm as SyncBatchNorm
    from .nn import convert_sync_batchnorm as convert_sync_batchnorm
    from .options import AutocastKwargs as AutocastKwargs
    from .options import DataLoaderConfiguration as DataLoaderConfiguration
    from .options import DDPCommunicationHookType as DDPCommunicationHookType
    from .options import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from .options import GradientAccumulationPlugin as GradientAccumulationPlugin
    from .options import GradScalerKwargs as GradScalerKwargs
    from .options import LoggerType as LoggerType
    from .options import ProfileKwargs as ProfileKwargs
    from .options import ProjectConfiguration as ProjectConfiguration
    from .parts.spikes import SpikeGuard as SpikeGuard
    from .plan import Plan as Plan
    from .plan import make_plan as make_plan
    from .protocols import Choice as Choice
    from .protocols import Source as Source
    from .protocols import Tracker as Tracker
    from .settings import Settings as Settings
    from .settings import resolve as resolve
    from .strategies.fsdp import FSDPOptions as FSDPOptions
    from .strategies.fsdp import HSDPOptions as HSDPOptions
    from .strategies.local_sgd import LocalSGD as LocalSGD
    from .strategies.local_sgd import LocalSGDOptions as LocalSGDOptions
    from .strategies.pipeline import PipelineOptions as PipelineOptions
    from .strategies.tensor_parallel import TensorParallelOptions as TensorParallelOptions
    from .strategies.transforms import CompileOptions as CompileOptions
    from .trackers.logbook import GeneralTracker as GeneralTracker
    from .training import memory as memory
    from .training.collectives import broadcast as broadcast
    from .training.collectives import broadcast_object_list as broadcast_object_list
    from .training.collectives import gather as gather
    from .training.collectives import gather_object as gather_object
    from .training.collectives import pad_across_processes as pad_across_processes
    from .training.collectives import reduce as reduce
    from .training.oom import find_executable_batch_size as find_executable_batch_size
    from .training.oom import release_memory as release_memory
    from .training.wrapper import forward_method as forward_method

# The module of each public name, the same as the imports above; tests/test_public.py compares the two.
_HOMES = {
    "accelerator": "Accelerator",
    "base.parts": "Part",
    "base.pytree": "concatenate find_batch_size recursively_apply send_to_device",
    "base.rng": "set_seed",
    "checkpoint.export": "load",
    "checkpoint.weights": "load_weights",
    "data": "PreparedLoader skip_first_batches",
    "errors": "BatchError CheckpointError EasympError EasympWarning KernelError NonfiniteError "
    "PrepareError RefusedError SettingError StepError TrackerError WorldError",
    "hardware": "Hardware detect",
    "launcher": "launch",
    "launcher.entrypoints": "debug_launcher notebook_launcher",
    "logging": "get_logger tqdm",
    "nn": "SyncBatchNorm convert_sync_batchnorm",
    "options": "AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DistributedDataParallelKwargs "
    "GradScalerKwargs GradientAccumulationPlugin LoggerType ProfileKwargs ProjectConfiguration",
    "parts.spikes": "SpikeGuard",
    "plan": "Plan make_plan",
    "protocols": "Choice Source Tracker",
    "settings": "Settings resolve",
    "strategies.fsdp": "FSDPOptions HSDPOptions",
    "strategies.local_sgd": "LocalSGD LocalSGDOptions",
    "strategies.pipeline": "PipelineOptions",
    "strategies.tensor_parallel": "TensorParallelOptions",
    "strategies.transforms": "CompileOptions",
    "trackers.logbook": "GeneralTracker",
    "training.collectives": "broadcast broadcast_object_list gather gather_object pad_across_processes reduce",
    "training.memory": "memory",
    "training.oom": "find_executable_batch_size release_memory",
    "training.wrapper": "forward_method",
}

# Names of Accelerate that easymp itself does not have. Scripts that change only their import line ask for them here.
_ACCELERATES = (
    "AORecipeKwargs DeepSpeedPlugin DummyOptim DummyScheduler DynamoBackend FP8RecipeKwargs MegatronLMPlugin "
    "FullyShardedDataParallelPlugin ParallelismConfig TERecipeKwargs TorchDynamoPlugin TorchTensorParallelPlugin "
    "cpu_offload disk_offload dispatch_model infer_auto_device_map init_empty_weights init_on_device "
    "load_checkpoint_and_dispatch load_checkpoint_in_model synchronize_rng_states wait_for_everyone "
    "extract_model_from_parallel is_torch_version patch_environment "
    "AcceleratorState DistributedType GradientState InitProcessGroupKwargs PartialState PrecisionType"
)

if not TYPE_CHECKING:  # type checkers would take a module's `__getattr__` for one that has every name
    __all__, __getattr__, __dir__ = at_first_use(
        __name__,
        globals(),
        {module: names.split() for module, names in _HOMES.items()},
        inner={
            "nn": ["nn"],
            "optim": ["optim"],
        },  # not in __all__, or ``import *`` would replace torch's modules of these names
        elsewhere={
            "DataParallelOptions": "data_parallel has no options: CUDA_VISIBLE_DEVICES chooses its accelerators",
            **dict.fromkeys(_ACCELERATES.split(), "easymp.compat.accelerate has it, or says what replaces it"),
            "NormalizeImages": "use torchvision.transforms.v2.ToDtype(scale=True) and Normalize, on the batch's device",
        },
    )
    __all__ += ["__version__"]  # the list that __dir__ returns
