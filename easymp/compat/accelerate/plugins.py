"""Plugins in the words of easymp, stand-ins for absent classes, checkpoints of one object, trackers and loggers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from torch import nn

from ... import logging
from ...checkpoint import folders, load, save
from ...checkpoint.model_state import ModelState, OptimizerState
from ...errors import RefusedError, SettingError, StepError, nearest
from ...options import KwargsHandler
from ...strategies.fsdp import FSDPOptions, HSDPOptions
from ...strategies.transforms import CompileOptions
from ...trackers import logbook
from ..layer import REFUSED, Layer, by_word
from .processes import PartialState

layer = Layer("Accelerate", "accelerate", "accelerate")


def stand_in(name: str, instead: str) -> type:
    """A class for imports, annotations and isinstance.

    A call raises RefusedError, which says what to write `instead`.
    """

    def refuse(kind: type, *args: Any, **kwargs: Any) -> Any:
        raise RefusedError(f"{name} is not part of easymp: {instead}")

    return type(name, (), {"__new__": refuse, "__doc__": f"Not part of easymp: {instead}.", "__module__": __name__})


MEMBERS = by_word(REFUSED["accelerate"]["members"])
FSDP_PLUGIN = REFUSED["accelerate"]["fsdp_plugin"]
FIELDS: list[str] = FSDP_PLUGIN["fields"].split()
# Sharding strategies of torch's FSDP1 (numbers are 1, 2 … in this order): the strategy here, its options, and whether
# weights are freed between forward and backward.
SHARDING: dict[str, tuple[str, type[FSDPOptions] | None, bool]] = {
    "FULL_SHARD": ("fsdp", FSDPOptions, True),
    "SHARD_GRAD_OP": ("fsdp", FSDPOptions, False),
    "NO_SHARD": ("ddp", None, True),
    "HYBRID_SHARD": ("hsdp", HSDPOptions, True),
    "HYBRID_SHARD_ZERO2": ("hsdp", HSDPOptions, False),
}
WRAP_POLICIES = ("transformer_based_wrap", "size_based_wrap")


class FullyShardedDataParallelPlugin:
    """Strategy "fsdp" (or "hsdp", "ddp") in Accelerate's words; a single process trains alone, as there.

    Attributes:
        strategy, options: the arguments of the Accelerator.
        activation_checkpointing: as the Accelerator's.
        The options by Accelerate's names, as they were given.

    Raises:
        SettingError: an option that the plugin does not have, or a wrong value.
        RefusedError: an option that has another place here, or none.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        arguments = {**dict(zip(FIELDS, args)), **keywords}
        for name, value in arguments.items():
            if name not in FIELDS:
                raise SettingError(f"FullyShardedDataParallelPlugin has no {name!r}{nearest(name, FIELDS)}")
            if name in FSDP_PLUGIN["refused"] and value not in (None, False):
                raise RefusedError(f"FullyShardedDataParallelPlugin({name}=…): {FSDP_PLUGIN['refused'][name]}")
        values = {name: value for name, value in arguments.items() if value is not None}
        layer.ignore({name: reason for name, reason in FSDP_PLUGIN["without_effect"].items() if name in values})
        vars(self).update({**dict.fromkeys(FIELDS), **arguments})
        sharding = _sharding(values.get("sharding_strategy"), values.get("reshard_after_forward"))
        policy = values.get("auto_wrap_policy")
        if policy is not None and str(policy).lower() not in WRAP_POLICIES:
            raise RefusedError(
                f"auto_wrap_policy={policy!r} is not honoured: fsdp gathers the repeated blocks that it finds, the "
                "classes of transformer_cls_names_to_wrap, or modules of min_num_params"
            )
        classes = values.get("transformer_cls_names_to_wrap")
        classes = classes.split(",") if isinstance(classes, str) else classes
        wrap = tuple(classes) if classes else values.get("min_num_params") or "blocks"
        # A bool, or a record of FSDP1 or FSDP2.
        offload = values.get("cpu_offload")
        offload = getattr(offload, "offload_params", offload)
        on_host = offload is True or type(offload).__name__ == "CPUOffloadPolicy"
        self.strategy, record, reshard = sharding
        self.options = record and record(reshard_after_forward=reshard, wrap=wrap, cpu_offload=on_host)
        self.activation_checkpointing = bool(values.get("activation_checkpointing"))
        self.fsdp_version = 2
        self.state_dict_type = arguments.get("state_dict_type", "SHARDED_STATE_DICT")


def _sharding(strategy: Any, reshard: Any) -> tuple[str, type[FSDPOptions] | None, bool]:
    """The entry of SHARDING that FSDP1's `strategy` names, or FSDP2's `reshard`, a bool or such a name."""
    if strategy is None and isinstance(reshard, bool):
        return "fsdp", FSDPOptions, reshard
    value = next((value for value in (strategy, reshard) if value is not None), "FULL_SHARD")
    name = str(getattr(value, "name", value)).upper()
    if name.isdigit() and 0 < int(name) <= len(SHARDING):
        name = list(SHARDING)[int(name) - 1]
    if name not in SHARDING:
        raise SettingError(f"sharding_strategy={value!r} is not one of {', '.join(SHARDING)}{nearest(name, SHARDING)}")
    return SHARDING[name]


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """torch.compile in Accelerate's words; `use_regional_compilation` is ``what="blocks"``."""

    backend: Any = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def compile_options(self) -> CompileOptions | bool | None:
        """The argument of `Accelerator(compile=…)`; None without a backend."""
        if self.backend is None:
            return None
        backend = str(self.backend).lower()
        if self.disable or backend == "no":
            return False
        return CompileOptions(
            "blocks" if self.use_regional_compilation else "model",
            backend,
            mode=None if self.mode == "default" else self.mode,
            fullgraph=bool(self.fullgraph),
            dynamic=self.dynamic,
            options=self.options,
        )


# -- checkpoints of one sharded model or optimizer, as libraries write them --------------------------------------------


def save_fsdp_model(
    fsdp_plugin: Any, accelerator: Any, model: Any, output_dir: str, model_index: int = 0, **_: Any
) -> None:
    """Write the weights of one prepared model to ``pytorch_model_fsdp_0`` in `output_dir`; all ranks call it."""
    _save(accelerator, model, output_dir, f"pytorch_model_fsdp_{model_index}")


def save_fsdp_optimizer(
    fsdp_plugin: Any, accelerator: Any, optimizer: Any, model: Any, output_dir: str, optimizer_index: int = 0, **_: Any
) -> None:  # fmt: skip
    """Write the state of one prepared optimizer to ``optimizer_0`` in `output_dir`; all ranks call it."""
    _save(accelerator, optimizer, output_dir, f"optimizer_{optimizer_index}")


def load_fsdp_model(
    fsdp_plugin: Any, accelerator: Any, model: Any, input_dir: str, model_index: int = 0, **_: Any
) -> None:
    """Load what `save_fsdp_model` wrote; all ranks call it."""
    _load(accelerator, model, input_dir, f"pytorch_model_fsdp_{model_index}")


def load_fsdp_optimizer(
    fsdp_plugin: Any, accelerator: Any, optimizer: Any, model: Any, input_dir: str, optimizer_index: int = 0, **_: Any
) -> None:  # fmt: skip
    """Load what `save_fsdp_optimizer` wrote; all ranks call it."""
    _load(accelerator, optimizer, input_dir, f"optimizer_{optimizer_index}")


def _part(accelerator: Any, item: Any) -> Any:
    """The part of a checkpoint that holds a prepared model or optimizer."""
    prepared, kind = accelerator._prepared, ModelState if isinstance(item, nn.Module) else OptimizerState
    if kind is ModelState:
        index = prepared.models.index(*prepared.routes((item,)))
    else:
        index = next((i for i, o in enumerate(prepared.optimizers) if item in (o, o.optimizer)), None)
    if index is None:
        raise StepError(f"this {type(item).__name__} is not prepared: pass what prepare() returned")
    parts = accelerator._saved_items(range(len(prepared.models)))
    return [part for part in parts if isinstance(part, kind)][index]


def _save(accelerator: Any, item: Any, folder: str, name: str) -> None:
    part = _part(accelerator, item)
    accelerator._world.settle()
    target = save.Target(folders.open_storage(os.fspath(folder)), name, 0, accelerator.plan.as_dict())
    accelerator._saver().save(target, [part])


def _load(accelerator: Any, item: Any, folder: str, name: str) -> None:
    storage = folders.open_storage(os.fspath(folder))
    load.load_checkpoint(accelerator._world, storage, name, [_part(accelerator, item)])


# -- trackers and loggers ----------------------------------------------------------------------------------------------


class GeneralTracker(logbook.GeneralTracker):
    """Base class of a script's trackers, which get what the script passes, at once; see `easymp.GeneralTracker`."""

    as_given = True

    def __init__(self, _blank: bool = False) -> None:
        own_classes = set(type(self).__mro__) - set(GeneralTracker.__mro__)
        defined = vars(self).keys() | {name for kind in own_classes for name in vars(kind)}
        missing = [name for name in ("name", "requires_logging_directory", "tracker") if name not in defined]
        if missing and not _blank:
            raise NotImplementedError(f"{type(self).__name__} has no {' and no '.join(missing)}: define it there")


class MultiProcessAdapter(logging.RankLogger):
    """easymp's logger, which with `in_order` and ``main_process_only=False`` logs on rank 0, then on rank 1 …"""

    def log(  # type: ignore[override]  # Accelerate's keyword
        self, level: int, msg: object, *args: Any, in_order: bool = False, **options: Any
    ) -> None:
        options["stacklevel"] = options.get("stacklevel", 1) + 1
        if not in_order or options.get("main_process_only", True):
            super().log(level, msg, *args, **options)
            return
        state = PartialState()
        for rank in range(state.num_processes):
            if rank == state.process_index:
                super().log(level, msg, *args, **options)
            state.wait_for_everyone()


def get_logger(name: str, log_level: str | int | None = None) -> MultiProcessAdapter:
    """As `easymp.get_logger`."""
    return MultiProcessAdapter(logging.get_logger(name, log_level).logger, {})
