"""The Accelerator with the arguments, their order and the defaults of Accelerate.

Defaults that change the training are Accelerate's: fp32, schedulers that step once a process (scripts count their horizon so), and no
logs without `log_with`. Settings of the environment and of easymp.toml go before them.
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ... import accelerator
from ...base.pytree import leaves
from ...checkpoint import accelerate, folders
from ...checkpoint.api import Path
from ...checkpoint.load import Loaded
from ...checkpoint.save import SaveCalls
from ...data import SkippedLoader
from ...distributed import read_ranks
from ...distributed.processes import DistributedType
from ...errors import BatchError, CheckpointError, RefusedError, SettingError, StepError
from ...logging import get_logger
from ...optim import PreparedScheduler
from ...options import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    LoggerType,
    ProjectConfiguration,
)
from ...settings import as_record, read_record, resolve
from ...strategies.ddp import Replica
from ...trackers import TRACKERS
from ...trackers.logbook import SILENT
from ...training.collectives import gather_object
from ...training.state import GradientState, accelerators
from ..layer import unless_set
from .plugins import MEMBERS, FullyShardedDataParallelPlugin, TorchDynamoPlugin, layer, made_by_name
from .utils import extract_model_from_parallel

logger = get_logger(__name__)
EXISTS = "exists already: set ProjectConfiguration(iteration=…) to the next number"
ALONE = "a parameter of no prepared model"
KNOWN = (nn.Module, Optimizer, DataLoader, SkippedLoader, PreparedScheduler, type(None))

AS_THEY_ARE = (
    "device_placement gradient_accumulation_steps cpu deepspeed_plugin deepspeed_plugins parallelism_config torch_tp_plugin "
    "megatron_lm_plugin project_dir project_config gradient_accumulation_plugin step_scheduler_with_optimizer dynamo_backend"
)
NATIVE = """
acc = Accelerator(mixed_precision={!r}, gradient_accumulation_steps={}, scheduler_steps_per_process=True, log_with={!r})
"""


class AcceleratedScheduler(PreparedScheduler):
    """Scheduler by Accelerate's rule: a call on a synchronizing micro-step steps once a process, unless the update was skipped.

    easymp's own rule counts optimizer updates. This one counts calls, also before the first update and after several ones.
    """

    def __init__(self, *given: Any, split_batches: bool = False, **how: Any) -> None:
        super().__init__(*given, **how)
        self._split_batches = split_batches

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the schedule. Without `split_batches`, steps past its `total_steps` are left out."""
        if not self._with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        self.each_update = max(self.behind, default=0) == 1 and not args and not kwargs
        self.behind = [0] * len(self.optimizers)
        if GradientState().sync_gradients and not any(it.step_was_skipped for it in self.optimizers):
            total = None if self._split_batches else getattr(self.scheduler, "total_steps", None)
            for _ in range(self._steps):
                if total is None or self.scheduler.last_epoch < total:
                    self.scheduler.step(*args, **kwargs)


def _open_here() -> Any:
    if not accelerators():
        raise StepError("a pickled Accelerator stands for the one that is open, and none is: make one first")
    return accelerators()[-1]


def _is_schedule(item: Any) -> bool:
    return callable(getattr(item, "step", None)) and hasattr(item, "state_dict")


class Accelerator(accelerator.Accelerator):
    """`easymp.Accelerator` for scripts of Accelerate; see there. `others` are easymp's further arguments.

    Raises:
        SettingError: a wrong name or value.
        RefusedError: something that was asked for cannot run here, or has another place.
    """

    def __init__(
        self, device_placement: bool = True, split_batches: bool | None = None, mixed_precision: Any = None,
        gradient_accumulation_steps: int | None = None, cpu: bool | None = None,
        dataloader_config: DataLoaderConfiguration | None = None, deepspeed_plugin: Any = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None, torch_tp_plugin: Any = None, megatron_lm_plugin: Any = None,
        rng_types: Sequence[Any] | None = None, log_with: Any = None, project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True, kwargs_handlers: Sequence[Any] | None = None, dynamo_backend: Any = None,
        dynamo_plugin: TorchDynamoPlugin | None = None, deepspeed_plugins: Any = None, parallelism_config: Any = None, **others: Any,
    ) -> None:  # fmt: skip
        given = dict(locals())
        asked = resolve(dataloader_config=dataloader_config)
        read = partial(as_record, DataLoaderConfiguration, "dataloader_config")
        loading = read_record(asked, "dataloader_config", read)
        if split_batches is not None:
            loading = dataclasses.replace(loading, split_batches=split_batches)
        if rng_types is not None:
            layer.ignore({"rng_types": "the order of data is the same on all ranks by itself"})
        if dynamo_plugin is None and dynamo_backend is None and "compile" not in others:
            of_variables = TorchDynamoPlugin()
            dynamo_plugin = of_variables if of_variables.backend else None
        if dynamo_plugin is not None:
            if dynamo_backend is not None:
                raise SettingError("both dynamo_plugin and dynamo_backend ask for torch.compile: pass one")
            others["compile"] = dynamo_plugin.compiling()
        if fsdp_plugin is not None and read_ranks().size > 1:
            others |= {"strategy": fsdp_plugin.strategy, "strategy_options": fsdp_plugin.options}
            others["activation_checkpointing"] = fsdp_plugin.activation_checkpointing
            self._fsdp_plugin = fsdp_plugin
            if fsdp_plugin.options is not None:
                before = list(kwargs_handlers or ())
                kwargs_handlers = [it for it in before if not isinstance(it, DistributedDataParallelKwargs)]
                if len(kwargs_handlers) < len(before):
                    why = f"strategy {fsdp_plugin.strategy} has no DDP"
                    layer.ignore({"DistributedDataParallelKwargs": why})
        others.setdefault("scheduler_steps_per_process", not loading.split_batches)
        self._make_scheduler = partial(AcceleratedScheduler, split_batches=loading.split_batches)  # type: ignore[method-assign]
        project, me = project_config or ProjectConfiguration(project_dir), weakref.ref(self)
        folder = project.logging_dir or project_dir
        words = log_with if isinstance(log_with, (list, tuple)) else [log_with]
        if "tensorboard" in words and folder is None and asked.project_dir is None:
            raise SettingError(
                "Logging with `tensorboard` requires a `logging_dir`: pass project_dir, or ProjectConfiguration(logging_dir=…)"
            )
        words = [made_by_name(word, lambda: me()._logbook.run, folder) for word in words]  # type: ignore[union-attr]
        log_with = words if isinstance(log_with, (list, tuple)) else words[0]
        super().__init__(
            mixed_precision=unless_set(asked, "mixed_precision", mixed_precision, "no"),
            dataloader_config=loading,
            log_with=unless_set(asked, "log_with", log_with, "none"),
            kwargs_handlers=kwargs_handlers or (),
            **{name: given[name] for name in AS_THEY_ARE.split()},
            **others,
        )
        self._window.full_passes = True
        self._apart = False  # the last calls of the models were under no_sync
        self._save_calls = SaveCalls(self._world, lambda there: me()._help(there))  # type: ignore[union-attr]
        native = NATIVE.format(self.mixed_precision, self._window.accumulation, log_with or "none")
        layer.use("Accelerator()", native)

    def __reduce__(self) -> Any:
        """Pickled, it is the Accelerator that is open where it is used, as the states are."""
        return _open_here, ()

    def __getattr__(self, name: str) -> Any:
        """What libraries know the lists of prepared objects by; other members of Accelerate's say what to write."""
        if name in ("_optimizers", "_schedulers", "_dataloaders"):
            return getattr(self._prepared, name.replace("data", "").removeprefix("_"))
        way = f": {MEMBERS[name]}" if name in MEMBERS else ""
        raise AttributeError(f"Accelerator has no {name!r}{way}")

    def prepare(
        self, *args: Any, device_placement: Sequence[bool | None] | None = None, **options: Any
    ) -> Any:
        """As `easymp.Accelerator.prepare`; objects that it does not know stay as they are."""
        asked = device_placement or [None] * len(args)
        if (n := len(asked)) != len(args):
            raise SettingError(f"device_placement has {n} values for {len(args)} objects: pass one for each")
        known = [i for i, item in enumerate(args) if isinstance(item, KNOWN) or _is_schedule(item)]
        items, placed = [args[i] for i in known], [asked[i] for i in known]
        self._adopt(items)
        done = super().prepare(*items, device_placement=placed, **options)
        found = dict(zip(known, (done,) if len(known) == 1 else done))
        for item in found.values():
            if item is not None:
                item._is_accelerate_prepared = True  # libraries ask for it
            if isinstance(item, DataLoader):
                item.gradient_state = self.gradient_state  # type: ignore[attr-defined]
        result = tuple(found.get(i, item) for i, item in enumerate(args))
        return result[0] if len(result) == 1 else result

    def free_memory(self, *objects: Any) -> list[None]:
        """As `easymp.Accelerator.free_memory`; a list, also of one object or none."""
        super().free_memory(*objects)
        return [None] * len(objects)

    clear = free_memory

    def no_sync(self, model: nn.Module | None = None) -> AbstractContextManager[None]:
        """As `easymp.Accelerator.no_sync`; the `backward` of a loss from inside may also follow outside, and stays on its rank, too."""
        self._apart = True
        return super().no_sync(model)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """As `easymp.Accelerator.backward`; see `no_sync`."""
        replicas = [r.module for r in self._prepared.models if isinstance(r.module, Replica)]
        self._apart = self._apart and bool(replicas) and not any(replica.armed for replica in replicas)
        alone, self._alone = self._alone, self._alone or self._apart
        try:
            super().backward(loss, **kwargs)
        finally:
            self._alone = alone

    def _adopt(self, items: Sequence[Any]) -> None:
        """One process: optimizers without their models are prepared, too, and the models may come later."""
        owner = self._prepared.owner
        own = {id(p) for model in items if isinstance(model, nn.Module) for p in model.parameters()}
        for known in [known for known in own if owner.get(known) == ALONE]:
            del owner[known]
        if self.num_processes == 1:
            groups = [group for item in items if isinstance(item, Optimizer) for group in item.param_groups]
            held = {id(p) for group in groups for p in group["params"]}
            owner.update(dict.fromkeys(held - own - owner.keys(), ALONE))

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """As `easymp.Accelerator.prepare_data_loader`; only None is taken as `slice_fn_for_dispatch`."""
        if slice_fn_for_dispatch is not None:
            raise RefusedError("slice_fn_for_dispatch is not honoured: batches are cut along dimension 0")
        return super().prepare_data_loader(data_loader, device_placement)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """See `extract_model_from_parallel` in ``accelerate.utils``."""
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def init_trackers(
        self, project_name: str, config: Any = None, init_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """As `easymp.Accelerator.init_trackers`; options of trackers that this run does not have wait for one that has."""
        super().init_trackers(project_name, config, self._for_this_run(init_kwargs))
        if not set(self._logbook.names) <= TRACKERS.keys():  # the script's own start here, as in Accelerate
            self._logbook.all()

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """As `easymp.Accelerator.get_tracker`; in a run without trackers an object that takes every call and does nothing."""
        return super().get_tracker(name, unwrap) if self._logbook.names else SILENT

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """As `easymp.Accelerator.log`; the script's own GeneralTrackers get values and step at once, and as they were passed."""
        book, options = self._logbook, self._for_this_run(log_kwargs)
        book.check_open("log")
        given = [name for name, one in book.own.items() if getattr(one, "as_given", False)]
        for name in book.trackers.keys() & given:
            further = book.by_name(options, "log_kwargs").get(name, {})
            book.attempt(name, partial(book.trackers[name].log, values, step=step, **further), rows=1)
        if not given or len(given) < len(book.names) or book.attached:
            super().log(values, step, options)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `easymp.Accelerator.gather_for_metrics`; what it refuses (scalars, calls outside of loops) is gathered, with one warning."""
        try:
            return super().gather_for_metrics(input_data, use_gather_object)
        except BatchError as error:
            layer.ignore({"gather_for_metrics": f"nothing was taken out of what it gathered: {error}"})
        objects = use_gather_object or not any(isinstance(leaf, Tensor) for leaf in leaves(input_data))
        return gather_object(input_data) if objects else self.gather(input_data)

    def save_state(
        self, output_dir: Path | None = None, safe_serialization: bool = True, **options: Any
    ) -> str:
        """As `easymp.Accelerator.save_state`; False writes ``pytorch_model.bin`` beside the checkpoint's own files.

        With ``automatic_checkpoint_naming`` it is ``checkpoint_0``, ``checkpoint_1`` …, by `save_iteration`.
        """
        binary = partial(accelerate.beside, main=self.is_main_process)
        handle = None if safe_serialization else self.register_save_state_pre_hook(binary)
        try:
            if self.num_processes == 1 or self._save_calls.all_called():
                return super().save_state(output_dir=output_dir, **options)
            return self._save_alone(output_dir) if self.is_main_process else ""
        except CheckpointError as error:
            if EXISTS in str(error):
                raise SettingError(str(error)) from None
            raise
        finally:
            if handle is not None:
                handle.remove()

    def _folder_name(self, step: int) -> str:
        if not self._project.automatic_checkpoint_naming:
            return super()._folder_name(step)
        name = f"checkpoint_{self.save_iteration}"
        if os.path.exists(folders.inside(self._root, name)):
            raise CheckpointError(f"{folders.inside(self._root, name)} {EXISTS}")
        return name

    def load_state(self, input_dir: Path | None = None, load_kwargs: Any = None, **options: Any) -> Loaded:
        """As `easymp.Accelerator.load_state`; of `load_kwargs` and of `map_location` only None and this device make no difference."""
        if load_kwargs is not None:
            raise RefusedError(f"load_state(load_kwargs={load_kwargs!r}) is not honoured: leave it out")
        if options.pop("map_location", None) is not None:
            layer.ignore({"map_location": "each tensor is read to where its live one is"})
        if input_dir is not None and "://" not in os.fspath(input_dir) and not os.path.isdir(input_dir):
            raise SettingError(f"load_state({os.fspath(input_dir)!r}): there is no such folder")
        return super().load_state(input_dir=input_dir, **options)

    def save_model(
        self, model: nn.Module, save_directory: str | os.PathLike[str], max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:  # fmt: skip
        """As `easymp.Accelerator.save_model`; False writes ``pytorch_model.bin``, or shards of it and their index."""
        if self._sharded and self.num_processes > 1 and not self._save_calls.all_called():
            raise RefusedError(
                f"save_model() under `if accelerator.is_main_process:`: strategy {self.plan.strategy.value!r} shards the weights, and each "
                "rank sends its part. Take the call out of the condition, so that all ranks make it"
            )
        if os.path.isfile(save_directory):
            logger.error("save_model(%r): it is a file, not a folder", save_directory)
            return
        if safe_serialization:
            super().save_model(model, save_directory, max_shard_size)
            return
        state = self.get_state_dict(model)
        if self.is_main_process:
            accelerate.write_model(state, os.fspath(save_directory), max_shard_size)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """As `easymp.Accelerator.save`; False writes by torch.save what ``torch.load(weights_only=True)`` reads."""
        if safe_serialization:
            super().save(obj, f)
        elif self.is_main_process:
            accelerate.write(obj, f)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """As `easymp.Accelerator.register_for_checkpointing`."""
        unfit = [
            f"Item at index {i} is a {type(item).__name__}"
            for i, item in enumerate(objects)
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict"))
        ]
        if unfit:
            raise SettingError(f"{'; '.join(unfit)}: pass objects with state_dict and load_state_dict")
        super().register_for_checkpointing(*objects)

    should_save_model = property(lambda self: self.is_main_process)  # whether this process writes weights

    def _for_this_run(self, options: Mapping[str, Any] | None) -> dict[str, Any]:
        known = {word.value for word in LoggerType} - set(self._logbook.names)
        return {name: given for name, given in (options or {}).items() if str(name).lower() not in known}

    @property
    def scaler(self) -> Any:
        """The loss scaler under fp16, else None."""
        return super().scaler if self._scaler.scales else None

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-step ends its window; a script that counts micro-steps itself sets it."""
        return self._window.sync

    @sync_gradients.setter
    def sync_gradients(self, sync: bool) -> None:
        self._window.sync = sync

    _models = property(lambda self: self._views())  # libraries ask whether there are any
    multi_device = property(lambda self: self.use_distributed)
    is_fsdp2 = property(lambda self: self.distributed_type == DistributedType.FSDP)
    # Strategy and strategy_options say how models are split, no run here is DeepSpeed's, and fp8 is torch's own.
    parallelism_config = deepspeed_plugin = fp8_backend = property(lambda self: None)
