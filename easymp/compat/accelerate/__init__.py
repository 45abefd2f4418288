"""Accelerate's interface: ``from easymp.compat.accelerate import Accelerator``, and ``easymp.compat.accelerate.utils`` beside it.

The Accelerator has Accelerate's defaults and order of arguments, and the modules have its names. Inference of models that are larger
than a device, quantization, and DeepSpeed and Megatron as engines are not part of it.
"""

from __future__ import annotations

from ...data import PreparedLoader, skip_first_batches
from ...distributed.processes import DistributedType
from ...launcher.entrypoints import debug_launcher, notebook_launcher
from ...optim import PreparedOptimizer
from ...strategies.local_sgd import LocalSGD
from ...trackers import GeneralTracker, on_main_process
from ...training.oom import find_executable_batch_size, release_memory
from ...training.state import AcceleratorState, GradientState, PartialState, is_open
from ..alias import VERSION, install
from ..layer import submodules
from . import logging, utils
from .accelerator import AcceleratedScheduler, Accelerator
from .plugins import OFFLOADING, layer

__version__ = VERSION  # for scripts that ask

OWN_TRACKER = (
    "pass its word to Accelerator(log_with=…), and find it by accelerator.get_tracker(word, unwrap=True)"
)
_OFFLOADING = (
    "cpu_offload cpu_offload_with_hook disk_offload dispatch_model infer_auto_device_map init_on_device "
    "load_checkpoint_and_dispatch"
)
_HOOKS = (
    "AlignDevicesHook CpuOffload ModelHook SequentialHook UserCpuOffloadHook add_hook_to_module attach_align_device_hook "
    "remove_hook_from_module remove_hook_from_submodules"
)
MODULES = {
    "big_modeling": {
        "init_empty_weights": utils.init_empty_weights,
        "absent": dict.fromkeys(_OFFLOADING.split(), OFFLOADING),
    },
    "commands": {"absent": dict.fromkeys(("config", "launch"), "run `easymp config` and `easymp launch`")},
    "hooks": {"absent": dict.fromkeys(_HOOKS.split(), OFFLOADING)},
    "parallelism_config": {"ParallelismConfig": utils.ParallelismConfig},
    "data_loader": {
        "DataLoaderDispatcher": PreparedLoader,
        "DataLoaderShard": PreparedLoader,
        "skip_first_batches": skip_first_batches,
        "absent": dict.fromkeys(
            ("BatchSamplerShard", "IterableDatasetShard", "prepare_data_loader"),
            "use accelerator.prepare(loader)",
        ),
    },
    "launchers": {"debug_launcher": debug_launcher, "notebook_launcher": notebook_launcher},
    "local_sgd": {"LocalSGD": LocalSGD},
    "memory_utils": {
        "find_executable_batch_size": find_executable_batch_size,
        "release_memory": release_memory,
    },
    "optimizer": {"AcceleratedOptimizer": PreparedOptimizer},
    "scheduler": {"AcceleratedScheduler": AcceleratedScheduler},
    "state": {
        "AcceleratorState": AcceleratorState,
        "DistributedType": DistributedType,
        "GradientState": GradientState,
        "PartialState": PartialState,
        "is_initialized": is_open,
    },
    "tracking": {
        "GeneralTracker": GeneralTracker,
        "on_main_process": on_main_process,
        "absent": dict.fromkeys(("MLflowTracker", "TensorBoardTracker", "WandBTracker"), OWN_TRACKER),
    },
}
submodules(__name__, MODULES, layer, "accelerate")

_UTILS = (
    "AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DeepSpeedPlugin DistributedDataParallelKwargs DistributedType "
    "FullyShardedDataParallelPlugin GradScalerKwargs InitProcessGroupKwargs ParallelismConfig ProfileKwargs is_rich_available"
)
globals().update({name: getattr(utils, name) for name in _UTILS.split()})
init_empty_weights = utils.init_empty_weights

__all__ = [
    "Accelerator",
    "LocalSGD",
    "PartialState",
    "debug_launcher",
    "find_executable_batch_size",
    "init_empty_weights",
    "install",
    "logging",
    "notebook_launcher",
    "skip_first_batches",
    "utils",
]
__all__ += [*MODULES, *_UTILS.split()]

__getattr__ = layer.absent(
    "accelerate",
    {
        **dict.fromkeys(_OFFLOADING.split(), OFFLOADING),
        "load_checkpoint_in_model": "use easymp.load_weights(model, folder)",
        "prepare_pippy": "use Accelerator(strategy='pipeline'), which trains",
        "synchronize_rng_states": utils.ALIKE,
        "test_utils": "use easymp.debug_launcher, or `easymp test`",
    },
    lambda: __all__,
)
