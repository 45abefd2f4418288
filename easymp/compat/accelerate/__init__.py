"""Accelerate's interface: ``from easymp.compat.accelerate import Accelerator``, and ``easymp.compat.accelerate.utils`` beside it.

Its defaults and the order of its arguments, where easymp's own differ (see `Accelerator`), its modules, and its names that are
somewhere else in easymp. Not here: inference of models that are larger than a device, quantization, DeepSpeed and Megatron as engines.
"""

from __future__ import annotations

from ...data import skip_first_batches
from ...launcher.functions import debug_launcher, notebook_launcher
from ...strategies.local_sgd import LocalSGD
from ...training.oom import find_executable_batch_size
from . import (
    data_loader,
    launchers,
    local_sgd,
    logging,
    memory_utils,
    optimizer,
    scheduler,
    state,
    tracking,
    utils,
)
from .accelerator import Accelerator
from .layer import OFFLOADING, layer
from .state import PartialState
from .utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ParallelismConfig,
    ProfileKwargs,
    is_rich_available,
)

__version__ = "1.15.0"  # whose interface this is, for scripts that ask

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "InitProcessGroupKwargs",
    "LocalSGD",
    "ParallelismConfig",
    "PartialState",
    "ProfileKwargs",
    "data_loader",
    "debug_launcher",
    "find_executable_batch_size",
    "is_rich_available",
    "launchers",
    "local_sgd",
    "logging",
    "memory_utils",
    "notebook_launcher",
    "optimizer",
    "scheduler",
    "skip_first_batches",
    "state",
    "tracking",
    "utils",
]

META = "build the model under `with torch.device('meta'):`; prepare gives it its values, easymp.load_weights those of a file"

__getattr__ = layer.absent(
    "accelerate",
    {
        **dict.fromkeys(("init_empty_weights", "init_on_device"), META),
        **dict.fromkeys(
            (
                "cpu_offload",
                "cpu_offload_with_hook",
                "disk_offload",
                "dispatch_model",
                "infer_auto_device_map",
            ),
            OFFLOADING,
        ),
        "load_checkpoint_and_dispatch": OFFLOADING,
        "load_checkpoint_in_model": "use easymp.load_weights(model, folder)",
        "prepare_pippy": "use Accelerator(strategy='pipeline'), which trains",
        "synchronize_rng_states": "easymp.set_seed(seed) seeds all ranks alike; the order of data is the same on them by itself",
        "hooks": OFFLOADING,
        "big_modeling": OFFLOADING,
        "test_utils": "use easymp.debug_launcher, or `easymp test`",
    },
    lambda: __all__,
)
