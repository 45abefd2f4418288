"""Plugins, loaders, trackers and loggers with Accelerate's defaults, and checkpoints of one object.

Loaders draw Accelerate's random numbers, read one batch ahead as it does, and have its last batches.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from ... import logging, options
from ...checkpoint import folders, load, save
from ...checkpoint.model_state import ModelState, OptimizerState
from ...data import PreparedLoader, SkippedLoader, prepare_loader
from ...data.order import flagged
from ...distributed import World
from ...errors import RefusedError, SettingError, StepError, nearest
from ...strategies.fsdp import FSDPOptions, HSDPOptions
from ...strategies.transforms import CompileOptions
from ...trackers import logbook
from ..layer import REFUSED, Layer
from .processes import PartialState

layer = Layer("Accelerate", "accelerate", "accelerate")


def stand_in(name: str, instead: str) -> type:
    """A class for imports, annotations and isinstance. A call raises RefusedError, with what to write `instead`."""

    def refuse(kind: type, *args: Any, **kwargs: Any) -> Any:
        raise RefusedError(f"{name} is not part of easymp: {instead}")

    return type(name, (), {"__new__": refuse, "__doc__": f"Not part of easymp: {instead}.", "__module__": __name__})


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
        self.strategy, record, reshard = _sharding(values.get("sharding_strategy"), values.get("reshard_after_forward"))
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
        self.options = record and record(reshard_after_forward=reshard, wrap=wrap, cpu_offload=on_host)
        self.activation_checkpointing = bool(values.get("activation_checkpointing"))
        self.fsdp_version = 2
        self.state_dict_type = arguments.get("state_dict_type", "SHARDED_STATE_DICT")


def _sharding(strategy: Any, reshard: Any) -> tuple[str, type[FSDPOptions] | None, bool]:
    """The entry of SHARDING for FSDP1's `strategy` (a name or a number), or for FSDP2's `reshard` (also a bool)."""
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
class TorchDynamoPlugin(options.KwargsHandler):
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
        scope: Any = "blocks" if self.use_regional_compilation else "model"
        mode = None if self.mode == "default" else self.mode
        return CompileOptions(
            scope, backend, mode=mode, fullgraph=bool(self.fullgraph), dynamic=self.dynamic, options=self.options
        )


# -- loaders -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class DataLoaderConfiguration(options.DataLoaderConfiguration):
    """`easymp.DataLoaderConfiguration` with Accelerate's defaults for the order of data and for dispatching.

    Attributes:
        dispatch_batches: rank 0 reads and sends; None does so for iterable data sets.
        even_batches: for map-style data sets that all ranks read.
        use_seedable_sampler: shuffle by ``seed + epoch``. False draws as a plain DataLoader.
    """

    use_seedable_sampler: bool = False


class SeedableRandomSampler(RandomSampler):
    """RandomSampler whose order is that of the seed ``initial_seed + epoch``."""

    epoch = 0

    def __init__(self, sampler: RandomSampler, initial_seed: int) -> None:
        generator = sampler.generator or torch.Generator()
        super().__init__(sampler.data_source, sampler.replacement, sampler._num_samples, generator)
        self.initial_seed = initial_seed

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.initial_seed + self.epoch)
        return super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class AcceleratedLoader(PreparedLoader):
    """Prepared loader that reads one batch ahead, as Accelerate does.

    Samplers and data sets with `set_epoch` get the number of whole passes: one that the script leaves early, or that
    `skip_first_batches` begins later, does not count.
    """

    _was_whole = False

    def _feed(self, skip: int) -> Iterator[Any]:
        self._was_whole = False
        for batch, _ in flagged(super()._feed(skip)):
            yield batch
        self._was_whole = not skip

    def _end(self) -> None:
        if self._with_set_epoch and not self._was_whole and self._next_epoch is None:
            self._next_epoch = self.epoch
        super()._end()


def make_loader(
    loader: DataLoader[Any], window: Any, world: World, rank: int, size: int,
    config: options.DataLoaderConfiguration, seed: int, place: bool = True,
) -> PreparedLoader:  # fmt: skip
    """As `easymp.data.prepare_loader`, with Accelerate's numbers."""
    if isinstance(loader, (PreparedLoader, SkippedLoader)):
        return loader
    streams = isinstance(getattr(loader, "dataset", None), IterableDataset)
    dispatch = (streams and place) if config.dispatch_batches is None else config.dispatch_batches
    if isinstance(loader, DataLoader) and not streams:
        _replace_sampler(loader, world, config, own_generator=size > 1 and not dispatch)
    config = dataclasses.replace(
        config,
        use_seedable_sampler=False,  # the sampler itself is seeded
        dispatch_batches=dispatch,
        even_batches=config.even_batches or streams or dispatch,
    )
    return prepare_loader(
        loader, window, world, rank, size, config, seed, place, kind=AcceleratedLoader, split_tail=dispatch
    )


def _replace_sampler(
    loader: DataLoader[Any], world: World, config: options.DataLoaderConfiguration, own_generator: bool
) -> None:
    """Make the random sampler of `loader` a seedable one, or give it a generator, in place as Accelerate does."""
    batches: Any = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, RandomSampler) and config.use_seedable_sampler:
        initial_seed = torch.initial_seed() if config.data_seed is None else config.data_seed
        batches.sampler = SeedableRandomSampler(sampler, world.broadcast_objects([initial_seed])[0])
    elif own_generator and getattr(sampler, "generator", own_generator) is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        vars(sampler)["generator"] = torch.Generator().manual_seed(seed)


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
    """Base class of a script's trackers. They get values unchanged and without delay; see `easymp.GeneralTracker`."""

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
        self, level: int, msg: object, *args: Any, in_order: bool = False, **keywords: Any
    ) -> None:
        keywords["stacklevel"] = keywords.get("stacklevel", 1) + 1
        if not in_order or keywords.get("main_process_only", True):
            super().log(level, msg, *args, **keywords)
            return
        state = PartialState()
        for rank in range(state.num_processes):
            if rank == state.process_index:
                super().log(level, msg, *args, **keywords)
            state.wait_for_everyone()


def get_logger(name: str, log_level: str | int | None = None) -> MultiProcessAdapter:
    """As `easymp.get_logger`."""
    return MultiProcessAdapter(logging.get_logger(name, log_level).logger, {})
