"""DeepSpeed's interface on an Accelerator: ``from easymp.compat import deepspeed``.

fp16 is fp16 weights with fp32 masters (O2) and DeepSpeed's loss scale; bf16 is autocast over fp32 weights; ZeRO's stages 1 and 2 are
strategy "zero1", where each rank holds whole parameters, and stage 3 is "fsdp"; checkpoints are easymp's. Scripts are started by
`easymp launch`. Not here: pipelines and mixtures of experts, inference, 1-bit optimizers, moving to disks.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

import torch

from ... import optim
from ...distributed import read_ranks
from ...errors import SettingError
from ...version import __version__
from ..layer import submodules
from .config import ABSENT, ADDRESSES, layer, read
from .engine import DeepSpeedEngine, InitializeError
from .modules import MODULES, get_accelerator, init_distributed, log_dist, logger
from .optimizers import (
    SCHEDULES,
    DeepSpeedCPUAdam,
    FusedAdam,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

_MODULES: dict[str, dict[str, Any]] = {
    **{address: {} for address in ("ops", "runtime", *filter(None, ABSENT))},
    **MODULES,
    "ops.adagrad": {"DeepSpeedCPUAdagrad": optim.Adagrad},
    "ops.adam": {"DeepSpeedCPUAdam": DeepSpeedCPUAdam, "FusedAdam": FusedAdam},
    "ops.lamb": {"FusedLamb": optim.LAMB},
    "ops.lion": {"DeepSpeedCPULion": optim.Lion, "FusedLion": optim.Lion},
    "runtime.lr_schedules": SCHEDULES,
}
_MODULES = {at: {"absent": ABSENT.get(at, {}), **names} for at, names in sorted(_MODULES.items())}
submodules(__name__, {**_MODULES, **ADDRESSES}, layer, "deepspeed")

__all__ = [
    "DeepSpeedEngine", "LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR", "__version__",
    "accelerator", "add_config_arguments", "checkpointing", "comm", "get_accelerator", "init_distributed", "initialize", "log_dist",
    "logger", "ops", "runtime", "utils", "zero",
]  # fmt: skip


def initialize(
    args: Any = None, model: torch.nn.Module | None = None, optimizer: Any = None, model_parameters: Any = None,
    training_data: Any = None, lr_scheduler: Any = None, distributed_port: int = 29500, mpu: Any = None,
    dist_init_required: bool | None = None, collate_fn: Any = None, config: Any = None, mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:  # fmt: skip
    """Make the engine; returns (engine, optimizer, training_dataloader, lr_scheduler), with None for those that are not there.

    `args` may have `deepspeed_config`, a path, and gets `local_rank`. `optimizer` and `lr_scheduler` may be functions that make one;
    without them the configuration's are made, for `model_parameters` (parameters or param groups; None: all). Each rank reads its share of
    `training_data`, in shuffled micro-batches. `config` is a dict or a path.

    Raises:
        AssertionError: no model, or a scheduler of another optimizer.
        SettingError: no configuration or two, or one that is wrong.
    """
    if model is None:
        raise InitializeError("deepspeed.initialize requires a model: pass model=")
    if not isinstance(model, torch.nn.Module):
        raise SettingError(f"deepspeed.initialize(model={model!r}): pass a torch.nn.Module")
    for name, made in (("optimizer", optimizer), ("lr_scheduler", lr_scheduler)):
        if not (made is None or callable(made) or hasattr(made, "step")):
            raise SettingError(f"{name}={made!r} is neither one nor a function that makes one")
    named = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    configs = [c for c in (config, config_params, named) if c is not None]
    if not configs:
        raise SettingError("DeepSpeed requires --deepspeed_config FILE, or config= as a dict or a path")
    if len(configs) > 1:
        raise SettingError("the configuration is given twice: pass config=, or args.deepspeed_config")
    meshes = {"mpu": mpu, "mesh_param": mesh_param}
    layer.ignore({name: "the strategy arranges ranks" for name, value in meshes.items() if value is not None})
    found = read(configs[0], read_ranks().size)
    given = (optimizer, model_parameters, training_data, lr_scheduler, collate_fn)
    engine = DeepSpeedEngine(model, found, *given)
    if hasattr(args, "local_rank"):
        args.local_rank = engine.local_rank
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """``--deepspeed`` and ``--deepspeed_config`` for a script's parser."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="a flag for the script's own code")
    group.add_argument("--deepspeed_config", help="DeepSpeed's configuration, a JSON file")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)  # DeepSpeed's former name
    group.add_argument("--deepscale_config", help=argparse.SUPPRESS)
    return parser


DeepSpeedConfigError = SettingError
__git_hash__ = __git_branch__ = "unknown"  # a release has none
__version_major__, __version_minor__, __version_patch__ = map(int, re.findall(r"\d+", __version__)[:3])

__getattr__ = layer.absent("deepspeed", ABSENT[""], lambda: __all__)
