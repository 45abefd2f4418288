"""Accelerate's interface: ``from easymp.compat.accelerate import Accelerator``, and ``easymp.compat.accelerate.utils`` beside it.

The Accelerator has Accelerate's defaults and order of arguments, and the modules have its names; ``refused.toml`` lists those that are
refused, above all the inference of models that are larger than a device, quantization, and DeepSpeed and Megatron as engines. The modules
below this one (``accelerate.state``, ``accelerate.tracking`` …) all have the same names.
"""

from __future__ import annotations

from typing import Any

from ...data import PreparedLoader, skip_first_batches
from ...launcher.entrypoints import debug_launcher, notebook_launcher
from ...optim import PreparedOptimizer
from ...strategies.local_sgd import LocalSGD
from ...trackers.logbook import on_main_process
from ...training.state import AcceleratorState, GradientState, PartialState, is_open
from ..alias import VERSION, install
from ..layer import named, submodules
from . import plugins, utils
from .accelerator import AcceleratedScheduler, Accelerator
from .plugins import INSTEAD, layer

__version__ = VERSION  # for scripts that ask

NAMES: dict[str, Any] = utils.NAMES | named(
    *(
        AcceleratedScheduler,
        Accelerator,
        AcceleratorState,
        GradientState,
        LocalSGD,
        PartialState,
        plugins.GeneralTracker,
        plugins.MLflowTracker,
        plugins.TensorBoardTracker,
        plugins.WandBTracker,
    ),
    *(debug_launcher, notebook_launcher, on_main_process, skip_first_batches),
    *(plugins.get_available_trackers, plugins.prepare_data_loader, plugins.register_tracker_class),
    AcceleratedOptimizer=PreparedOptimizer,
    DataLoaderDispatcher=PreparedLoader,
    DataLoaderShard=PreparedLoader,
    LOGGER_TYPE_TO_CLASS=plugins.LOGGER_TYPE_TO_CLASS,
    is_initialized=is_open,
)
_MODULES = (
    "big_modeling commands data_loader hooks inference launchers local_sgd memory_utils optimizer parallelism_config scheduler state "
    "tracking"
)
_WHOLE = {**NAMES, "absent": INSTEAD}
_LOGGING = named(plugins.MultiProcessAdapter, plugins.get_logger)
submodules(__name__, {**dict.fromkeys(_MODULES.split(), _WHOLE), "logging": _LOGGING}, layer, "accelerate")
_LISTED = (
    "Accelerator AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DeepSpeedPlugin DistributedDataParallelKwargs "
    "DistributedType FullyShardedDataParallelPlugin GradScalerKwargs InitProcessGroupKwargs LocalSGD ParallelismConfig PartialState "
    "ProfileKwargs debug_launcher find_executable_batch_size init_empty_weights is_rich_available load_checkpoint_in_model "
    "notebook_launcher skip_first_batches synchronize_rng_states"
)
globals().update({name: NAMES[name] for name in _LISTED.split()})
__all__ = [*_LISTED.split(), *_MODULES.split(), "install", "logging", "utils"]
__getattr__ = layer.absent("accelerate", INSTEAD, lambda: __all__)
