"""DeepSpeed's interface on an Accelerator: ``from easymp.compat import deepspeed``.

fp16 is fp16 weights with fp32 masters (O2) and DeepSpeed's loss scale; bf16 is autocast over fp32 weights; stages 1 and
2 are strategy "zero1", where each rank holds whole parameters, and stage 3 is "fsdp"; checkpoints are easymp's.
Not here: pipelines and mixtures of experts, inference, 1-bit optimizers, moving to disks.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

from ... import optim
from ...errors import SettingError
from ..alias import PACKAGES
from ..layer import by_name
from . import modules
from .config import DeepSpeedConfig, layer
from .engine import DeepSpeedEngine
from .modules import get_accelerator, init_distributed, log_dist, logger
from .optimizers import SCHEDULES, DeepSpeedCPUAdam, FusedAdam, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "DeepSpeedConfig", "DeepSpeedEngine", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR", "__version__",
    "accelerator", "add_config_arguments", "checkpointing", "comm", "get_accelerator", "init_distributed",
    "initialize", "log_dist", "logger", "ops", "runtime", "utils", "zero",
]  # fmt: skip


def initialize(
    args: Any = None, model: torch.nn.Module | None = None, optimizer: Any = None, model_parameters: Any = None,
    training_data: Any = None, lr_scheduler: Any = None, distributed_port: int = 29500, mpu: Any = None,
    dist_init_required: bool | None = None, collate_fn: Any = None, config: Any = None, mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:  # fmt: skip
    """Make the engine; returns (engine, optimizer, training_dataloader, lr_scheduler), with None for absent ones."""
    if not isinstance(model, torch.nn.Module):
        raise SettingError(f"deepspeed.initialize(model={model!r}): pass a torch.nn.Module")
    for name, given in (("optimizer", optimizer), ("lr_scheduler", lr_scheduler)):
        if not (given is None or callable(given) or hasattr(given, "step")):
            raise SettingError(f"{name}={given!r} is neither one nor a function that makes one")
    configs = [c for c in (config, config_params, getattr(args, "deepspeed_config", None)) if c is not None]
    if not configs:
        raise SettingError("DeepSpeed requires --deepspeed_config FILE, or config= as a dict or a path")
    if len(configs) > 1:
        raise SettingError("the configuration is given twice: pass config=, or args.deepspeed_config")
    record = configs[0] if isinstance(configs[0], DeepSpeedConfig) else DeepSpeedConfig(configs[0])
    for name, value in {"mpu": mpu, "mesh_param": mesh_param}.items():
        if value is not None:
            record.ignored[name] = "the strategy arranges ranks"
    engine = DeepSpeedEngine(model, record, optimizer, model_parameters, training_data, lr_scheduler, collate_fn)
    layer.ignore(record.ignored)
    if hasattr(args, "local_rank"):
        args.local_rank = engine.local_rank
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config`` to a script's parser."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="a flag for the script's own code")
    group.add_argument("--deepspeed_config", help="DeepSpeed's configuration, a JSON file")
    return parser


# -- its modules, by their addresses


def _public(names: str) -> dict[str, Any]:
    return {name: getattr(modules, name) for name in names.split()}


_zero = _public("GatheredParameters Init ZeroParamStatus")
_checkpointing = _public("CheckpointFunction checkpoint configure is_configured reset")
_comm = "destroy_process_group get_local_rank get_rank get_world_size init_distributed"
_safe = [f"safe_{verb}_full_{value}" for verb in ("get", "set") for value in ("fp32_param", "grad", "optimizer_state")]
_utils = "RepeatingLoader log_dist logger see_memory_usage"
_weights = """convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint
    load_state_dict_from_zero_checkpoint"""
MODULES: dict[str, dict[str, Any]] = {
    "accelerator": _public("get_accelerator"),
    "checkpointing": _checkpointing | {"model_parallel_cuda_manual_seed": torch.manual_seed},
    "comm": _public(_comm) | {"__getattr__": partial(getattr, torch.distributed)},
    "ops": {},
    "ops.adagrad": {"DeepSpeedCPUAdagrad": torch.optim.Adagrad},
    "ops.adam": by_name(DeepSpeedCPUAdam, FusedAdam),
    "ops.lamb": {"FusedLamb": optim.LAMB},
    "ops.lion": {"DeepSpeedCPULion": optim.Lion, "FusedLion": optim.Lion},
    "runtime": {},
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.checkpointing": _checkpointing,
    "runtime.config": by_name(DeepSpeedConfig),
    "runtime.dataloader": _public("RepeatingLoader"),
    "runtime.lr_schedules": SCHEDULES,
    "runtime.utils": _public("see_memory_usage"),
    "runtime.zero": _zero,
    "runtime.zero.partition_parameters": _zero,
    "utils": _public(_utils) | _public(" ".join(_safe)),
    "utils.zero_to_fp32": _public(_weights),
    "zero": _zero,
}
layer.submodules(__name__, MODULES)
DeepSpeedConfigError = SettingError
__version__ = PACKAGES["deepspeed"][0]  # for scripts that ask
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in PACKAGES["deepspeed"][0].split("."))
__getattr__ = layer.absent(__name__)
