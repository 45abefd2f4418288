"""``accelerate.utils``: all names of its modules. Each has its home in a room of easymp; here they have the peer's address."""

from __future__ import annotations

from typing import Any

from ....logging import tqdm as tqdm
from ..layer import DEEPSPEED, MEGATRON, OFFLOADING, QUANTIZED, layer, stand_in
from . import dataclasses, environment, imports, memory, operations, other, random, versions
from .dataclasses import *  # noqa: F403
from .environment import *  # noqa: F403
from .memory import *  # noqa: F403
from .operations import *  # noqa: F403
from .other import *  # noqa: F403
from .random import *  # noqa: F403
from .versions import *  # noqa: F403

DummyOptim = stand_in("DummyOptim", DEEPSPEED)
DummyScheduler = stand_in("DummyScheduler", DEEPSPEED)
HfDeepSpeedConfig = stand_in("HfDeepSpeedConfig", DEEPSPEED)
MegatronLMDummyDataLoader = stand_in("MegatronLMDummyDataLoader", MEGATRON)
MegatronLMDummyScheduler = stand_in("MegatronLMDummyScheduler", MEGATRON)

_ROOMS = (dataclasses, environment, imports, memory, operations, other, random, versions)
__all__ = sorted(
    {
        *(name for room in _ROOMS for name in room.__all__),
        *(
            "DummyOptim",
            "DummyScheduler",
            "HfDeepSpeedConfig",
            "MegatronLMDummyDataLoader",
            "MegatronLMDummyScheduler",
            "tqdm",
        ),
    }
)

_absent = layer.absent(
    "accelerate.utils",
    {
        **dict.fromkeys(
            (
                "get_balanced_memory",
                "get_max_memory",
                "infer_auto_device_map",
                "set_module_tensor_to_device",
                "offload_state_dict",
            ),
            OFFLOADING,
        ),
        **dict.fromkeys(("load_and_quantize_model", "has_4bit_bnb_layers"), QUANTIZED),
        **dict.fromkeys(
            ("load_checkpoint_in_model", "load_state_dict"), "use easymp.load_weights(model, place)"
        ),
        **dict.fromkeys(("load_fsdp_model", "load_fsdp_optimizer"), "use accelerator.load_state(folder)"),
        **dict.fromkeys(
            ("save_fsdp_model", "save_fsdp_optimizer"), "use accelerator.save_state(folder), or save_model"
        ),
        "merge_fsdp_weights": "run `easymp checkpoint merge FOLDER TARGET`",
        "compile_regions": "use Accelerator(compile='blocks')",
        "compute_module_sizes": "use easymp.training.memory.estimate(model)",
        "GatheredParameters": "read a sharded parameter by parameter.full_tensor(), on all ranks",
        "find_tied_parameters": "tied weights are found, kept once and tied again by themselves",
        "retie_parameters": "tied weights are found, kept once and tied again by themselves",
        **other.INSTEAD,
        **random.INSTEAD,
    },
    lambda: __all__,
)


def __getattr__(name: str) -> Any:
    return getattr(imports, name) if name in imports.__all__ else _absent(name)
