"""Plugins in the words of easymp, stand-ins for absent classes, checkpoints of one object, trackers and loggers."""

from __future__ import annotations

import functools
import os
import tomllib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ... import logging
from ...base import env
from ...checkpoint import folders, load, save
from ...checkpoint.model_state import ModelState, OptimizerState
from ...errors import RefusedError, SettingError, StepError, nearest
from ...options import KwargsHandler, LoggerType
from ...strategies.fsdp import FSDPOptions, HSDPOptions
from ...strategies.transforms import CompileOptions
from ...trackers import choose, logbook
from ...trackers.mlflow import MLflow
from ...trackers.tensorboard import TensorBoard
from ...trackers.wandb import WandB
from ..layer import Layer
from .processes import PartialState

layer = Layer("Accelerate")


def stand_in(name: str, instead: str) -> type:
    """A class for imports, annotations and isinstance.

    A call raises RefusedError, which says what to write `instead`.
    """

    def refuse(kind: type, *args: Any, **kwargs: Any) -> Any:
        raise RefusedError(f"{name} is not part of easymp: {instead}")

    return type(name, (), {"__new__": refuse, "__doc__": f"Not part of easymp: {instead}.", "__module__": __name__})


def _by_name(table: str) -> dict[str, str]:
    """The refused names in a table of refused.toml, each with what to write instead."""
    return {name: reason for reason, names in REFUSED_NAMES[table].items() for name in names.split()}


REFUSED_NAMES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("refused.toml").read_text("utf-8"))
INSTEAD, MEMBERS = _by_name("names"), _by_name("members")
FSDP_PLUGIN = REFUSED_NAMES["fsdp_plugin"]
FIELDS: list[str] = FSDP_PLUGIN["fields"].split()


class Sharding(NamedTuple):
    """A strategy, its record of options, and ``reshard_after_forward`` in it."""

    strategy: str
    record: type[FSDPOptions] | None
    reshard: bool = True


# Sharding strategies of torch's FSDP1; numbers are 1, 2 … in this order.
SHARDING = {
    "FULL_SHARD": Sharding("fsdp", FSDPOptions),
    "SHARD_GRAD_OP": Sharding("fsdp", FSDPOptions, reshard=False),
    "NO_SHARD": Sharding("ddp", None),
    "HYBRID_SHARD": Sharding("hsdp", HSDPOptions),
    "HYBRID_SHARD_ZERO2": Sharding("hsdp", HSDPOptions, reshard=False),
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
        self.strategy, self.options = sharding.strategy, None
        arguments_of_record = ""
        if sharding.record is not None:
            self.options = sharding.record(reshard_after_forward=sharding.reshard, wrap=wrap, cpu_offload=on_host)
            if self.options != sharding.record():
                arguments_of_record = f", strategy_options={self.options!r}"
        self.activation_checkpointing = bool(values.get("activation_checkpointing"))
        self.fsdp_version = 2
        self.state_dict_type = arguments.get("state_dict_type", "SHARDED_STATE_DICT")
        recompute = ", activation_checkpointing=True" if self.activation_checkpointing else ""
        native = f"acc = Accelerator(strategy={self.strategy!r}{arguments_of_record}{recompute})"
        layer.use("FullyShardedDataParallelPlugin(…)", native)


def _sharding(strategy: Any, reshard: Any) -> Sharding:
    """The entry of SHARDING that FSDP1's `strategy` names, or FSDP2's `reshard`, a bool or such a name."""
    if strategy is None and isinstance(reshard, bool):
        return Sharding("fsdp", FSDPOptions, reshard)
    value = next((value for value in (strategy, reshard) if value is not None), "FULL_SHARD")
    name = str(getattr(value, "name", value)).upper()
    if name.isdigit() and 0 < int(name) <= len(SHARDING):
        name = list(SHARDING)[int(name) - 1]
    if name not in SHARDING:
        raise SettingError(f"sharding_strategy={value!r} is not one of {', '.join(SHARDING)}{nearest(name, SHARDING)}")
    return SHARDING[name]


# Backends of torch.compile, by the names that scripts pass; the Accelerator refuses one that torch does not have.
_BACKENDS = (
    "NO EAGER AOT_EAGER INDUCTOR AOT_TS_NVFUSER NVPRIMS_NVFUSER CUDAGRAPHS OFI FX2TRT ONNXRT TENSORRT "
    "AOT_TORCHXLA_TRACE_ONCE TORCHXLA_TRACE_ONCE TVM HPU_BACKEND NEURON"
)
_VALUES = {name: name for name in _BACKENDS.split()}
DynamoBackend: Any = StrEnum("DynamoBackend", _VALUES, module=__name__)  # type: ignore[misc]  # no literal


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
        """Take what was not passed from ``ACCELERATE_DYNAMO_BACKEND``, ``_MODE`` …, as `easymp launch` sets them."""
        for name in ("backend", "mode", "fullgraph", "dynamic", "use_regional_compilation"):
            text = env.read(f"ACCELERATE_DYNAMO_{name.upper()}")
            if getattr(self, name) is None and text is not None:
                setattr(self, name, text if name in ("backend", "mode") else text.lower() in env.TRUE)

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that differ from their defaults, those of the environment among them."""
        with env.override(**dict.fromkeys(env.names("ACCELERATE_DYNAMO_"))):
            return super().to_kwargs()

    def compile_options(self) -> CompileOptions | bool:
        """The argument of `Accelerator(compile=…)`."""
        backend = str(self.backend or "no").lower()
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


# -- trackers and loggers: those of a script get what it passes, at once -----------------------------------------------


class GeneralTracker(logbook.GeneralTracker):
    """Base class of a script's trackers; see `easymp.GeneralTracker`.

    Raises:
        NotImplementedError: the class lacks `name`, `requires_logging_directory` or `tracker`.
    """

    as_given = True  # it gets what the script passes, and nothing more

    def __init__(self, _blank: bool = False) -> None:
        classes = set(type(self).__mro__) - {GeneralTracker, logbook.GeneralTracker, object}
        defined = {name for kind in classes for name in vars(kind)} | vars(self).keys()
        missing = [name for name in ("name", "requires_logging_directory", "tracker") if name not in defined]
        if missing and not _blank:
            raise NotImplementedError(
                f"{type(self).__name__} has no {' and no '.join(missing)}: define it in the class"
            )


class _ByHand:
    """A tracker of easymp that the script makes itself and passes in `log_with`."""

    run_name: str | None

    def __init__(self, run_name: str, logging_dir: Any = os.curdir, **kwargs: Any) -> None:
        super().__init__(Path(logging_dir), kwargs)  # type: ignore[call-arg]  # of the class that is mixed in
        self.run_name = run_name

    def start(self, run: str, config: Any, position: Any = None) -> None:
        super().start(self.run_name or run, config, position)  # type: ignore[misc]  # of the class that is mixed in


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


def get_available_trackers() -> list[LoggerType]:
    """The trackers whose packages are installed."""
    return [LoggerType(name) for name in choose("all", "log_with='all'", {})]


class MultiProcessAdapter(logging.RankLogger):
    """`easymp.logging`'s logger, which can also log on all ranks one after the other, and warn once."""

    def log(  # type: ignore[override]  # torch's ranks are further arguments
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
