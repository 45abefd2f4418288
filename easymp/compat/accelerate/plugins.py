"""Plugins in the words of easymp, stand-ins for absent classes, checkpoints of one sharded object, classes of trackers, and loggers."""

from __future__ import annotations

import functools
import os
import tomllib
import warnings
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ... import logging
from ...base import env
from ...checkpoint import folders, load, save
from ...checkpoint.model_state import ModelState, OptimizerState
from ...data import PreparedLoader
from ...data.prepare import prepare_loader
from ...errors import RefusedError, SettingError, StepError, nearest
from ...options import DataLoaderConfiguration, KwargsHandler, LoggerType
from ...strategies.fsdp import FSDPOptions, HSDPOptions
from ...strategies.transforms import CompileOptions
from ...trackers import choose, logbook
from ...trackers.mlflow import MLflow
from ...trackers.tensorboard import TensorBoard
from ...trackers.wandb import WandB
from ...training.state import GradientState, PartialState, current_world
from ..layer import Layer

layer = Layer("Accelerate")


def stand_in(name: str, instead: str) -> type:
    """A class for imports, annotations and isinstance; a call raises RefusedError, which says what to write `instead`."""

    def refuse(kind: type, *args: Any, **kwargs: Any) -> Any:
        raise RefusedError(f"{name} is not part of easymp: {instead}")

    said = f"Not part of easymp: {instead}."
    return type(name, (), {"__new__": refuse, "__doc__": said, "__module__": __name__})


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
_PLUGIN = REFUSED_NAMES["fsdp_plugin"]
FIELDS, WITHOUT_EFFECT, REFUSED = _PLUGIN["fields"].split(), _PLUGIN["without_effect"], _PLUGIN["refused"]


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

    def __init__(self, *args: Any, **named: Any) -> None:
        asked = {**dict(zip(FIELDS, args)), **named}
        for name, value in asked.items():
            if name not in FIELDS:
                raise SettingError(f"FullyShardedDataParallelPlugin has no {name!r}{nearest(name, FIELDS)}")
            if name in REFUSED and value not in (None, False):
                raise RefusedError(f"FullyShardedDataParallelPlugin({name}=…): {REFUSED[name]}")
        given = {name: value for name, value in asked.items() if value is not None}
        layer.ignore({name: why for name, why in WITHOUT_EFFECT.items() if name in given})
        vars(self).update({**dict.fromkeys(FIELDS), **asked})
        asked_for = given.get("sharding_strategy"), given.get("reshard_after_forward")
        self.strategy, kind, reshard = _sharding(*asked_for)
        policy, classes = given.get("auto_wrap_policy"), given.get("transformer_cls_names_to_wrap")
        if policy is not None and str(policy).lower() not in ("transformer_based_wrap", "size_based_wrap"):
            raise RefusedError(
                f"auto_wrap_policy={policy!r} is not honoured: fsdp gathers the repeated blocks that it finds, the classes of "
                "transformer_cls_names_to_wrap, or modules of min_num_params"
            )
        classes = classes.split(",") if isinstance(classes, str) else classes
        wrap = tuple(classes) if classes else given.get("min_num_params") or "blocks"
        # A bool, or a record of FSDP1 or FSDP2.
        offload = given.get("cpu_offload")
        offload = getattr(offload, "offload_params", offload)
        host = offload is True or type(offload).__name__ == "CPUOffloadPolicy"
        self.options = kind and kind(reshard_after_forward=reshard, wrap=wrap, cpu_offload=host)
        self.activation_checkpointing = bool(given.get("activation_checkpointing"))
        self.fsdp_version = 2
        self.state_dict_type = asked.get("state_dict_type", "SHARDED_STATE_DICT")
        words = "" if kind is None or self.options == kind() else f", strategy_options={self.options!r}"
        words += ", activation_checkpointing=True" if self.activation_checkpointing else ""
        native = f"acc = Accelerator(strategy={self.strategy!r}{words})"
        layer.use("FullyShardedDataParallelPlugin(…)", native)


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

    def __post_init__(self) -> None:
        """``ACCELERATE_DYNAMO_BACKEND``, ``_MODE`` … say what was not passed, as the words of `easymp launch --as accelerate`."""
        for name in ("backend", "mode", "fullgraph", "dynamic", "use_regional_compilation"):
            word = env.read(f"ACCELERATE_DYNAMO_{name.upper()}")
            if getattr(self, name) is None and word is not None:
                setattr(self, name, word if name in ("backend", "mode") else word.lower() in env.TRUE)

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that differ from their defaults, those of the environment among them."""
        with env.override(**dict.fromkeys(env.names("ACCELERATE_DYNAMO_"))):
            return super().to_kwargs()

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
        there = prepared.models.index(*prepared.routes((item,)))
    else:
        there = next((i for i, o in enumerate(prepared.optimizers) if item in (o, o.optimizer)), None)
    if there is None:
        raise StepError(f"this {type(item).__name__} is not prepared: pass what prepare() returned")
    parts = accelerator._parts(range(len(prepared.models)))
    return [part for part in parts if isinstance(part, kind)][there]


def _save(accelerator: Any, item: Any, folder: str, name: str) -> None:
    part = _part(accelerator, item)
    accelerator._world.settle()
    target = save.Target(folders.open_storage(os.fspath(folder)), name, 0, accelerator.plan.as_dict())
    accelerator._saver().save(target, [part])


def _load(accelerator: Any, item: Any, folder: str, name: str) -> None:
    storage = folders.open_storage(os.fspath(folder))
    load.load_checkpoint(accelerator._world, storage, name, [_part(accelerator, item)])


# -- loaders ----------------------------------------------------------------------------------------------------------


def prepare_data_loader(
    dataloader: DataLoader[Any], device: Any = None, num_processes: int | None = None, process_index: int | None = None,
    split_batches: bool = False, put_on_device: bool = False, rng_types: Any = None, dispatch_batches: bool | None = None,
    even_batches: bool = True, slice_fn_for_dispatch: Any = None, use_seedable_sampler: bool = False, data_seed: int | None = None,
    non_blocking: bool = False, use_stateful_dataloader: bool = False, torch_device_mesh: Any = None,
) -> PreparedLoader:  # fmt: skip
    """As `Accelerator.prepare_data_loader`, for any share: `num_processes`, of which this one is `process_index`."""
    if slice_fn_for_dispatch is not None or torch_device_mesh is not None:
        raise RefusedError("slice_fn_for_dispatch and torch_device_mesh are not honoured: leave them out")
    world = current_world()
    rank, size = world.rank if process_index is None else process_index, num_processes or world.size
    how = split_batches, dispatch_batches, even_batches, use_seedable_sampler, data_seed, non_blocking
    config = DataLoaderConfiguration(*how, use_stateful_dataloader=True)
    window = GradientState()._window
    return prepare_loader(dataloader, window, world, rank, size, config, torch.initial_seed(), put_on_device)


# -- trackers ---------------------------------------------------------------------------------------------------------

LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {}  # those that the script registered


class GeneralTracker(logbook.GeneralTracker):
    """Base class of a script's trackers; see `easymp.GeneralTracker`.

    Raises:
        NotImplementedError: the class lacks `name`, `requires_logging_directory` or `tracker`.
    """

    as_given = True  # it gets what the script passes, and nothing more

    def __init__(self, _blank: bool = False) -> None:
        kinds = set(type(self).__mro__) - {GeneralTracker, logbook.GeneralTracker, object}
        there = {name for kind in kinds for name in vars(kind)} | vars(self).keys()
        lacks = [name for name in ("name", "requires_logging_directory", "tracker") if name not in there]
        if lacks and not _blank:
            said = " and no ".join(lacks)
            raise NotImplementedError(f"{type(self).__name__} has no {said}: define it in the class")


class _ByHand:
    """A tracker of easymp that the script makes itself and passes in `log_with`."""

    run_name: str | None

    def __init__(self, run_name: str, logging_dir: Any = os.curdir, **kwargs: Any) -> None:
        super().__init__(Path(logging_dir), kwargs)  # type: ignore[call-arg]
        self.run_name = run_name

    def start(self, run: str, config: Any, position: Any = None) -> None:
        super().start(self.run_name or run, config, position)  # type: ignore[misc]


class TensorBoardTracker(_ByHand, TensorBoard):
    """TensorBoard's event files in ``logging_dir/run_name``; `kwargs` are those of torch's SummaryWriter."""


class WandBTracker(_ByHand, WandB):
    """One run of wandb in the project `run_name`; `kwargs` are those of `wandb.init`."""


class MLflowTracker(_ByHand, MLflow):
    """One run of MLflow; `kwargs` are those of `mlflow.start_run`."""

    def __init__(
        self, experiment_name: str | None = None, logging_dir: Any = None, run_id: str | None = None, tags: Any = None,
        nested_run: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        self.run_name, self.nested_run = experiment_name, env.flag("MLFLOW_NESTED_RUN", nested_run)
        options = {"run_id": run_id, "tags": tags, "nested_run": self.nested_run, **kwargs}
        MLflow.__init__(self, Path(logging_dir or os.curdir), options)


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Let `log_with` name a class of trackers, which is made as ``tracker_class(project_name, **options)``.

    A class with ``requires_logging_directory = True`` gets the folder as its second argument.

    Raises:
        SettingError: it is not a GeneralTracker, or has no name or no `requires_logging_directory` of its own.
    """
    kinds = tracker_class.__mro__ if isinstance(tracker_class, type) else ()
    said = [kind for kind in kinds if "requires_logging_directory" in vars(kind)]
    if logbook.GeneralTracker not in kinds or not tracker_class.name or said[0] is logbook.GeneralTracker:
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
        raise SettingError(f"log_with={word!r} needs a folder: pass project_dir, or a logging_dir")

    def made(self: Any, **options: Any) -> None:
        kind.__init__(self, run(), *([folder] if kind.requires_logging_directory else []), **options)  # type: ignore[misc]

    return type(kind.__name__, (kind,), {"__init__": made, "__module__": kind.__module__})


def get_available_trackers() -> list[LoggerType]:
    """The trackers whose packages are installed."""
    return [LoggerType(word) for word in choose("all", "log_with='all'", {})]


# -- loggers: for all ranks, on request one after the other -------------------------------------------------------------


class MultiProcessAdapter(logging.RankLogger):
    """`easymp.logging`'s logger, with two habits more."""

    def log(
        self, level: int, msg: object, *args: Any, main_process_only: bool = True, in_order: bool = False, **kwargs: Any
    ) -> None:  # fmt: skip
        """`in_order`: with ``main_process_only=False``, rank 0 first, then rank 1 …; all ranks call it."""
        kwargs.setdefault("stacklevel", 2)
        if main_process_only or not in_order:
            super().log(level, msg, *args, main_process_only=main_process_only, **kwargs)
            return
        state = PartialState()
        for rank in range(state.num_processes):
            if rank == state.process_index:
                super().log(level, msg, *args, main_process_only=False, **kwargs)
            state.wait_for_everyone()

    @functools.lru_cache(None)  # noqa: B019 (loggers live as long as the process)
    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """A warning that comes once, however often it is called with these words."""
        self.warning(*args, **kwargs)


def get_logger(name: str, log_level: str | int | None = None) -> MultiProcessAdapter:
    """As `easymp.get_logger`."""
    return MultiProcessAdapter(logging.get_logger(name, log_level).logger, {})
