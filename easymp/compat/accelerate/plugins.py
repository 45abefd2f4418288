"""Plugins in the words of easymp, stand-ins for absent classes, checkpoints of one sharded object, and a script's classes of trackers."""

from __future__ import annotations

import os
import tomllib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ...checkpoint import folders, load, save
from ...checkpoint.model_state import ModelState, OptimizerState
from ...errors import RefusedError, SettingError, StepError, nearest
from ...options import KwargsHandler, LoggerType
from ...strategies.fsdp import FSDPOptions, HSDPOptions
from ...strategies.transforms import CompileOptions
from ...trackers import choose, own
from ..layer import Layer

layer = Layer("Accelerate")


def stand_in(name: str, instead: str) -> type:
    """A class for imports, annotations and isinstance; a call raises RefusedError, which says what to write `instead`."""

    def refuse(kind: type, *args: Any, **kwargs: Any) -> Any:
        raise RefusedError(f"{name} is not part of easymp: {instead}")

    return type(
        name, (), {"__new__": refuse, "__doc__": f"Not part of easymp: {instead}.", "__module__": __name__}
    )


REFUSED_NAMES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("refused.toml").read_text("utf-8"))
INSTEAD, MEMBERS = (
    {name: reason for reason, names in REFUSED_NAMES[table].items() for name in names.split()}
    for table in ("names", "members")
)

# Words of torch's FSDP1, with strategy, its record of options, and `reshard_after_forward`; numbers are 1, 2 … in this order.
SHARDING: dict[str, tuple[str, type[FSDPOptions] | None, bool]] = {
    "FULL_SHARD": ("fsdp", FSDPOptions, True),
    "SHARD_GRAD_OP": ("fsdp", FSDPOptions, False),
    "NO_SHARD": ("ddp", None, True),
    "HYBRID_SHARD": ("hsdp", HSDPOptions, True),
    "HYBRID_SHARD_ZERO2": ("hsdp", HSDPOptions, False),
}
# Options of the plugin that make no difference here, each with the reason.
WITHOUT_EFFECT = {
    "fsdp_version": "strategy fsdp is FSDP2",
    "backward_prefetch": "FSDP2 gathers the next block ahead by itself",
    "forward_prefetch": "FSDP2 gathers the next block ahead by itself",
    "limit_all_gathers": "FSDP2 does so by itself",
    "use_orig_params": "parameters keep their names always",
    "sync_module_states": "all ranks begin with the values of rank 0",
    "state_dict_type": "save_state writes shards, save_model whole weights",
    "state_dict_config": "save_state writes shards, save_model whole weights",
    "optim_state_dict_config": "save_state writes shards",
    "cpu_ram_efficient_loading": "build the model under torch.device('meta') for that",
}
REFUSED = {
    "mixed_precision_policy": "types are Accelerator(mixed_precision=...)'s, and parameters stay fp32",
    "ignored_modules": "name them: FSDPOptions(ignore=('*.router',)) in strategy_options",
    "param_init_fn": "pass Accelerator(initialize=function)",
    "activation_checkpointing_offload": "pass Accelerator(activation_offload=True), on CUDA",
}


FIELDS = (
    "fsdp_version sharding_strategy reshard_after_forward backward_prefetch mixed_precision_policy auto_wrap_policy cpu_offload "
    "ignored_modules state_dict_type state_dict_config optim_state_dict_config limit_all_gathers use_orig_params param_init_fn "
    "sync_module_states forward_prefetch activation_checkpointing activation_checkpointing_offload cpu_ram_efficient_loading "
    "transformer_cls_names_to_wrap min_num_params"
).split()


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

    sharding_strategy: Any
    reshard_after_forward: Any
    auto_wrap_policy: Any
    cpu_offload: Any
    activation_checkpointing: Any
    transformer_cls_names_to_wrap: Any
    min_num_params: Any

    def __init__(self, *args: Any, **named: Any) -> None:
        asked = {**dict(zip(FIELDS, args)), **named}
        for name, value in asked.items():
            if name not in FIELDS:
                raise SettingError(f"FullyShardedDataParallelPlugin has no {name!r}{nearest(name, FIELDS)}")
            if name in REFUSED and value not in (None, False):
                raise RefusedError(
                    f"FullyShardedDataParallelPlugin({name}=…) is not honoured: {REFUSED[name]}"
                )
        vars(self).update({**dict.fromkeys(FIELDS), **asked})
        given = [name for name, value in asked.items() if name in WITHOUT_EFFECT and value is not None]
        layer.ignore({name: WITHOUT_EFFECT[name] for name in given})
        self.strategy, kind, reshard = _sharding(self.sharding_strategy, self.reshard_after_forward)
        wrap = _wrapped(self.auto_wrap_policy, self.transformer_cls_names_to_wrap, self.min_num_params)
        # A bool, or a record of FSDP1 or FSDP2.
        offload = getattr(self.cpu_offload, "offload_params", self.cpu_offload)
        host = offload is True or type(offload).__name__ == "CPUOffloadPolicy"
        self.options = kind and kind(reshard_after_forward=reshard, wrap=wrap, cpu_offload=host)
        self.activation_checkpointing = bool(self.activation_checkpointing)
        self.fsdp_version = 2
        self.state_dict_type = asked.get("state_dict_type", "SHARDED_STATE_DICT")
        words = "" if kind is None or self.options == kind() else f", strategy_options={self.options!r}"
        words += ", activation_checkpointing=True" if self.activation_checkpointing else ""
        layer.use(
            "FullyShardedDataParallelPlugin(…)", f"acc = Accelerator(strategy={self.strategy!r}{words})"
        )


def _sharding(word: Any, reshard: Any) -> tuple[str, type[FSDPOptions] | None, bool]:
    if word is None and isinstance(reshard, bool):
        return "fsdp", FSDPOptions, reshard
    given = word if word is not None else "FULL_SHARD" if reshard is None else reshard
    name = str(getattr(given, "name", given)).upper()
    if name.isdigit() and 0 < int(name) <= len(SHARDING):
        name = list(SHARDING)[int(name) - 1]
    if name not in SHARDING:
        raise SettingError(
            f"sharding_strategy={given!r} is not one of {', '.join(SHARDING)}{nearest(name, SHARDING)}"
        )
    return SHARDING[name]


def _wrapped(policy: Any, classes: Sequence[str] | None, smallest: int | None) -> str | tuple[str, ...] | int:
    word = str(policy).lower() if isinstance(policy, str) else None
    if policy is not None and word not in ("transformer_based_wrap", "size_based_wrap"):
        raise RefusedError(
            f"auto_wrap_policy={policy!r} is not honoured: fsdp gathers the repeated blocks that it finds, the classes of "
            "transformer_cls_names_to_wrap, or modules of min_num_params"
        )
    if classes:
        return tuple(classes.split(",")) if isinstance(classes, str) else tuple(classes)
    return smallest or "blocks"


# Backends of torch.compile, by the names that scripts pass; the Accelerator refuses one that torch does not have.
_BACKENDS = (
    "NO EAGER AOT_EAGER INDUCTOR AOT_TS_NVFUSER NVPRIMS_NVFUSER CUDAGRAPHS OFI FX2TRT ONNXRT TENSORRT AOT_TORCHXLA_TRACE_ONCE "
    "TORCHXLA_TRACE_ONCE TVM HPU_BACKEND NEURON"
).split()
DynamoBackend = StrEnum("DynamoBackend", {name: name for name in _BACKENDS}, module=__name__)


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

    def compiling(self) -> CompileOptions | bool:
        """The argument of `Accelerator(compile=…)`."""
        backend = str(self.backend or DynamoBackend.NO)
        if self.disable or backend.upper() == DynamoBackend.NO:
            return False
        what = "blocks" if self.use_regional_compilation else "model"
        mode = None if self.mode == "default" else self.mode
        return CompileOptions(what, backend.lower(), mode, bool(self.fullgraph), self.dynamic, self.options)


# -- checkpoints of one sharded model or optimizer, as libraries write them --------------------------------------------


def save_fsdp_model(
    fsdp_plugin: Any, accelerator: Any, model: Any, output_dir: str, model_index: int = 0, **_: Any
) -> None:
    """Write the weights of one prepared model to ``pytorch_model_fsdp_0`` in `output_dir`; all ranks call it."""
    _save(accelerator, _model(accelerator, model), output_dir, "pytorch_model_fsdp", model_index)


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    output_dir: str,
    optimizer_index: int = 0,
    **_: Any,
) -> None:
    """Write the state of one prepared optimizer to ``optimizer_0`` in `output_dir`; all ranks call it."""
    _save(accelerator, _optimizer(accelerator, optimizer), output_dir, "optimizer", optimizer_index)


def load_fsdp_model(
    fsdp_plugin: Any, accelerator: Any, model: Any, input_dir: str, model_index: int = 0, **_: Any
) -> None:
    """Load what `save_fsdp_model` wrote; all ranks call it."""
    _load(accelerator, _model(accelerator, model), input_dir, "pytorch_model_fsdp", model_index)


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    input_dir: str,
    optimizer_index: int = 0,
    **_: Any,
) -> None:
    """Load what `save_fsdp_optimizer` wrote; all ranks call it."""
    _load(accelerator, _optimizer(accelerator, optimizer), input_dir, "optimizer", optimizer_index)


def _model(accelerator: Any, model: Any) -> Any:
    (route,) = accelerator._prepared.routes((model,))
    index = [prepared.route for prepared in accelerator._prepared.models].index(route)
    return _parts(accelerator, ModelState)[index]


def _optimizer(accelerator: Any, optimizer: Any) -> Any:
    there = [o for o in accelerator._prepared.optimizers if optimizer in (o, o.optimizer)]
    if not there:
        raise StepError(f"this {type(optimizer).__name__} is not prepared: pass what prepare() returned")
    return _parts(accelerator, OptimizerState)[accelerator._prepared.optimizers.index(there[0])]


def _parts(accelerator: Any, kind: type) -> list[Any]:
    models = range(len(accelerator._prepared.models))
    return [part for part in accelerator._parts(models) if isinstance(part, kind)]


def _save(accelerator: Any, part: Any, folder: str, name: str, index: int) -> None:
    accelerator._world.settle()
    plan = accelerator.plan.as_dict()
    target = save.Target(folders.open_storage(os.fspath(folder)), f"{name}_{index}", 0, plan)
    accelerator._saver().save(target, [part])


def _load(accelerator: Any, part: Any, folder: str, name: str, index: int) -> None:
    storage = folders.open_storage(os.fspath(folder))
    load.load_checkpoint(accelerator._world, storage, f"{name}_{index}", [part])


# -- trackers ---------------------------------------------------------------------------------------------------------

LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {}  # those that the script registered


class GeneralTracker(own.GeneralTracker):
    """Base class of a script's trackers; see `easymp.GeneralTracker`.

    Raises:
        NotImplementedError: the class lacks `name`, `requires_logging_directory` or `tracker`.
    """

    as_given = True  # it gets what the script passes, and nothing more

    def __init__(self, _blank: bool = False) -> None:
        kinds = [
            kind for kind in type(self).__mro__ if kind not in (GeneralTracker, own.GeneralTracker, object)
        ]
        there = {name for kind in kinds for name in vars(kind)} | vars(self).keys()
        lacks = [name for name in ("name", "requires_logging_directory", "tracker") if name not in there]
        if lacks and not _blank:
            raise NotImplementedError(
                f"{type(self).__name__} has no {' and no '.join(lacks)}: define it in the class"
            )


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Let `log_with` name a class of trackers, which is made as ``tracker_class(project_name, **options)``.

    A class with ``requires_logging_directory = True`` gets the folder as its second argument.

    Raises:
        SettingError: it is not a GeneralTracker, or has no name or no `requires_logging_directory` of its own.
    """
    kinds = tracker_class.__mro__ if isinstance(tracker_class, type) else ()
    said = [kind for kind in kinds if "requires_logging_directory" in vars(kind)]
    if own.GeneralTracker not in kinds or not tracker_class.name or said[0] is own.GeneralTracker:
        raise SettingError(
            f"{tracker_class!r} cannot be registered: derive it from GeneralTracker, and set name and requires_logging_directory in it"
        )
    if tracker_class.name in LOGGER_TYPE_TO_CLASS:
        warnings.warn(f"the tracker {tracker_class.name!r} is registered anew", stacklevel=2)
    LOGGER_TYPE_TO_CLASS[tracker_class.name] = tracker_class


def made_by_name(word: Any, run: Any, folder: Any) -> Any:
    """`word`, or where a class is registered under it, one that `log_with` takes; `run` and `folder` are asked when it is made."""
    kind = LOGGER_TYPE_TO_CLASS.get(str(word)) if isinstance(word, str) else None
    if kind is None:
        return word
    if kind.requires_logging_directory and folder is None:
        raise SettingError(
            f"log_with={word!r}: this tracker needs a folder: pass project_dir, or a logging_dir"
        )

    def made(self: Any, **options: Any) -> None:
        kind.__init__(self, run(), *([folder] if kind.requires_logging_directory else []), **options)  # type: ignore[misc]

    return type(kind.__name__, (kind,), {"__init__": made, "__module__": kind.__module__})


def get_available_trackers() -> list[LoggerType]:
    """The trackers whose packages are installed."""
    return [LoggerType(word) for word in choose("all", "log_with='all'", {})]
