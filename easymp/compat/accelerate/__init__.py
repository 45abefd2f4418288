"""Accelerate's interface: ``from easymp.compat.accelerate import Accelerator``, and ``accelerate.utils`` beside it.

The Accelerator has Accelerate's defaults and order of arguments, and the modules have its names; ``refused.toml`` lists
those that are refused, above all the inference of models that are larger than a device, quantization, and DeepSpeed and
Megatron as engines. The modules below this one (``accelerate.state``, ``accelerate.tracking`` …) all have the same
names.
"""

from __future__ import annotations

from typing import Any

from ...data import skip_first_batches
from ...launcher.entrypoints import debug_launcher, notebook_launcher
from ...optim import PreparedOptimizer
from ...strategies.local_sgd import LocalSGD
from ...trackers.logbook import on_main_process
from ...training.state import OPEN_RUNS
from ..alias import VERSION, install
from ..layer import by_name
from . import plugins, utils
from .accelerator import AcceleratedScheduler, Accelerator
from .plugins import layer
from .processes import AcceleratorState, GradientState, PartialState

__version__ = VERSION  # for scripts that ask

NAMES: dict[str, Any] = {
    **utils.NAMES,
    **by_name(AcceleratedScheduler, Accelerator, AcceleratorState, GradientState, LocalSGD, PartialState),
    **by_name(plugins.GeneralTracker, on_main_process, debug_launcher, notebook_launcher),
    **by_name(plugins.SeedableRandomSampler, skip_first_batches),
    "AcceleratedOptimizer": PreparedOptimizer,
    "DataLoaderDispatcher": plugins.AcceleratedLoader,
    "DataLoaderShard": plugins.AcceleratedLoader,
    "is_initialized": lambda: bool(OPEN_RUNS),
}
_MODULES = (
    "big_modeling commands data_loader hooks inference launchers local_sgd memory_utils optimizer parallelism_config "
    "scheduler state tracking"
)
_logging = by_name(plugins.MultiProcessAdapter, plugins.get_logger)
layer.submodules(__name__, {**dict.fromkeys(_MODULES.split(), NAMES), "logging": _logging})
_PUBLIC = (
    "Accelerator AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DeepSpeedPlugin "
    "DistributedDataParallelKwargs DistributedType FullyShardedDataParallelPlugin GradScalerKwargs "
    "InitProcessGroupKwargs LocalSGD ParallelismConfig PartialState ProfileKwargs debug_launcher "
    "find_executable_batch_size init_empty_weights is_rich_available notebook_launcher skip_first_batches"
)
globals().update({name: NAMES[name] for name in _PUBLIC.split()})
__all__ = [*_PUBLIC.split(), *_MODULES.split(), "install", "logging", "utils"]
__getattr__ = layer.absent(__name__)
