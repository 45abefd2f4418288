"""The Accelerator with the arguments, their order and the defaults of Accelerate.

Defaults that change the training are Accelerate's: fp32, schedulers that step once a process (scripts compute their
length so), and no logs without `log_with`. The environment and easymp.toml win over these defaults.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from ... import accelerator, errors, profiling
from ... import options as records
from ...base.pytree import leaves
from ...checkpoint import export, folders, torch_files
from ...checkpoint.api import Path
from ...checkpoint.load import Loaded
from ...checkpoint.ranks import SaveCalls
from ...data import SkippedLoader
from ...distributed import check_backend, read_ranks
from ...errors import BatchError, CheckpointError, RefusedError, SettingError, StepError
from ...optim import PreparedScheduler
from ...optim.torch_step import parameters_of
from ...precision.policies import cast_outputs
from ...settings import as_record, read_record, resolve
from ...trackers import TRACKERS
from ...trackers.logbook import SILENT
from ...training.collectives import gather_object
from ...training.prepare import PrepareOptions
from ...training.state import accelerators
from ..layer import plain_steps_on_cpu, saving_between_micro_batches, unless_set
from .plugins import DataLoaderConfiguration, FullyShardedDataParallelPlugin, TorchDynamoPlugin, layer, make_loader
from .processes import AcceleratorState, AllProcesses, GradientState, InitProcessGroupKwargs, handlers_by_class
from .utils import extract_model_from_parallel

ALONE = "a parameter of no prepared model"
PREPARED_TYPES = (nn.Module, Optimizer, DataLoader, SkippedLoader, LRScheduler, PreparedScheduler, type(None))


class AcceleratedScheduler(PreparedScheduler):
    """Scheduler by Accelerate's rule: a call at a window's end makes `steps` steps, unless the update was skipped."""

    def __init__(self, scheduler: Any, optimizers: Sequence[Any], with_optimizer: bool = True, steps: int = 1) -> None:
        super().__init__(scheduler, optimizers)
        self._with_optimizer, self._steps = with_optimizer, steps

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the schedule."""
        if not self._with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        self.each_update = max(self.behind, default=0) == 1 and not args and not kwargs
        self.behind = [0] * len(self.optimizers)
        skipped = any(optimizer.step_was_skipped for optimizer in self.optimizers)
        if not GradientState().sync_gradients or skipped:
            return
        total = getattr(self.scheduler, "total_steps", None)
        for _ in range(self._steps):
            if total is None or self.scheduler.last_epoch < total:
                self.scheduler.step(*args, **kwargs)


def _current() -> Any:
    """The open Accelerator: an unpickled Accelerator becomes this one."""
    if not accelerators():
        raise StepError("a pickled Accelerator stands for the one that is open, and none is: make one first")
    return accelerators()[-1]


def adopt(acc: accelerator.Accelerator, items: Sequence[Any], replaces: bool = False) -> None:
    """Let `acc` prepare optimizers among `items` whose models come later, or never.

    With `replaces` also those whose parameters another prepared optimizer steps. Not where weights become shards,
    which an optimizer has to hold.
    """
    prepared = acc._prepared
    of_models = {id(p) for model in items if isinstance(model, nn.Module) for p in model.parameters()}
    for parameter in [parameter for parameter in of_models if prepared.owner.get(parameter) == ALONE]:
        del prepared.owner[parameter]
    if prepared.strategy.sharded:
        return
    stepped = {id(p) for item in items if isinstance(item, Optimizer) for p in parameters_of(item)}
    prepared.owner.update(dict.fromkeys(stepped - of_models - prepared.owner.keys(), ALONE))
    for parameter in stepped if replaces else ():
        prepared.stepped_by.pop(parameter, None)


class Accelerator(accelerator.Accelerator, AllProcesses):
    """`easymp.Accelerator` for scripts of Accelerate. `options` are easymp's further arguments and settings."""

    def __init__(
        self, device_placement: bool = True, split_batches: bool | None = None, mixed_precision: Any = None,
        gradient_accumulation_steps: int | None = None, cpu: bool | None = None,
        dataloader_config: DataLoaderConfiguration | None = None, deepspeed_plugin: Any = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None, torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None, rng_types: Sequence[Any] | None = None, log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None, project_config: records.ProjectConfiguration | None = None,
        gradient_accumulation_plugin: records.GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True, kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: Any = None, dynamo_plugin: TorchDynamoPlugin | None = None, deepspeed_plugins: Any = None,
        parallelism_config: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        for name, value in {
            "deepspeed_plugin": deepspeed_plugin,
            "deepspeed_plugins": deepspeed_plugins,
            "megatron_lm_plugin": megatron_lm_plugin,
            "parallelism_config": parallelism_config,
            "rng_types": rng_types,
            "torch_tp_plugin": torch_tp_plugin,
        }.items():
            if value is not None:
                raise RefusedError(f"Accelerator({name}={value!r}) is not honoured: {errors.OTHER_ARGUMENTS[name]}")
        handlers = handlers_by_class(kwargs_handlers)
        group = handlers.get(InitProcessGroupKwargs)
        self._profiling = handlers.get(records.ProfileKwargs)
        settings = resolve(
            options.pop("settings", None),
            dataloader_config=dataloader_config,
            device_placement=device_placement,
            autocast_options=handlers.get(records.AutocastKwargs),
            scaler_options=handlers.get(records.GradScalerKwargs),
            timeout=options.pop("timeout", None if group is None else group.seconds),
            **{name: options.pop(name) for name in options.keys() & errors.SETTING_REMEDIES.keys()},
        )
        device = None if cpu or settings.cpu else torch.accelerator.current_accelerator(check_available=True)
        if group is not None:
            check_backend(group.backend, device or torch.device("cpu"))
        settings = plain_steps_on_cpu(settings, device is None)
        make_record = partial(as_record, DataLoaderConfiguration, "dataloader_config")
        loading = read_record(settings, "dataloader_config", make_record)
        if split_batches is not None:
            loading = dataclasses.replace(loading, split_batches=split_batches)
        if sum(argument is not None for argument in (dynamo_plugin, dynamo_backend, options.get("compile"))) > 1:
            raise SettingError("dynamo_plugin, dynamo_backend and compile ask for torch.compile: pass one of them")
        plugin = dynamo_plugin or TorchDynamoPlugin(dynamo_backend)
        options.setdefault("compile", plugin.compile_options())
        of_ddp = handlers.get(records.DistributedDataParallelKwargs)
        if fsdp_plugin is not None and read_ranks().size > 1:
            self._fsdp_plugin = fsdp_plugin
            options["strategy"], options["strategy_options"] = fsdp_plugin.strategy, fsdp_plugin.options
            options["activation_checkpointing"] = fsdp_plugin.activation_checkpointing
        if of_ddp is not None and options.get("strategy_options") is not None:
            layer.ignore({"DistributedDataParallelKwargs": "strategy_options say what the strategy does"})
        elif of_ddp is not None:
            options["strategy_options"] = of_ddp
        if gradient_accumulation_plugin is not None and gradient_accumulation_steps not in (None, 1):
            raise SettingError(
                f"gradient_accumulation_steps={gradient_accumulation_steps} beside a gradient_accumulation_plugin: "
                "pass GradientAccumulationPlugin(num_steps=…) alone"
            )
        project = project_config or records.ProjectConfiguration()
        if project_dir is not None and project.project_dir is None:
            project.set_directories(project_dir)
        tracker_names = log_with if isinstance(log_with, (list, tuple)) else [log_with]
        if "tensorboard" in tracker_names and not (project.logging_dir or settings.project_dir):
            raise SettingError("log_with='tensorboard' requires a logging_dir: pass project_dir")
        self._loading = loading
        self._with_optimizer = step_scheduler_with_optimizer
        # A second bare Accelerator has the precision of the first.
        precision = accelerators()[0].mixed_precision if accelerators() else "no"
        super().__init__(
            mixed_precision=unless_set(settings, "mixed_precision", mixed_precision, precision),
            gradient_accumulation_steps=gradient_accumulation_plugin or gradient_accumulation_steps,
            cpu=cpu,
            dataloader_config=loading,
            project_dir=project,
            log_with=unless_set(settings, "log_with", log_with, "none"),
            settings=settings,
            **options,
        )
        self._window.full_passes = True
        self.device_placement = device_placement
        self._evaluated: list[nn.Module] = []  # models of prepare_model(evaluation_mode=True)
        self._save_calls = SaveCalls(self._world)

    def _change_preparing(self, options: PrepareOptions) -> PrepareOptions:
        steps = 1 if self._loading.split_batches else self._world.size
        make_scheduler = partial(AcceleratedScheduler, with_optimizer=self._with_optimizer, steps=steps)
        # Ranks with equal seeds draw equal numbers, before and after prepare().
        return options._replace(make_loader=make_loader, make_scheduler=make_scheduler, diverge=False)

    def __reduce__(self) -> Any:
        """Pickled, it is the Accelerator that is open where it is used, as the states are."""
        return _current, ()

    def __getattr__(self, name: str) -> Any:
        """Lists of prepared objects by the names that libraries use; an error says what replaces another member."""
        if name in ("_optimizers", "_schedulers", "_dataloaders"):
            return getattr(self._prepared, name.replace("data", "").removeprefix("_"))
        hint = f": {layer.members[name]}" if name in layer.members else ""
        raise AttributeError(f"Accelerator has no {name!r}{hint}")

    def prepare(  # type: ignore[override]  # takes any objects
        self, *args: Any, device_placement: Sequence[bool | None] | None = None, **options: Any
    ) -> Any:
        """As `easymp.Accelerator.prepare`; objects that it does not know stay as they are."""
        placement = device_placement or [None] * len(args)
        if len(placement) != len(args):
            values = f"device_placement has {len(placement)} values for {len(args)} objects"
            raise SettingError(f"{values}: pass one for each")
        indices = [i for i, item in enumerate(args) if isinstance(item, PREPARED_TYPES)]
        items = [args[i] for i in indices]
        if self.num_processes == 1:
            adopt(self, items)
        prepared = super().prepare(*items, device_placement=[placement[i] for i in indices], **options)
        results = list(args)
        for i, item in zip(indices, (prepared,) if len(indices) == 1 else prepared):
            results[i] = item
            if item is not None:
                item._is_accelerate_prepared = True  # libraries ask for it
            if isinstance(item, DataLoader):
                vars(item)["gradient_state"] = self.gradient_state
        return results[0] if len(results) == 1 else tuple(results)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare one model.

        With `evaluation_mode` a model that may train is moved and computes in the run's precision. It stays the same
        object, so that libraries prepare it again for training, and no rank averages its gradients.
        """
        if not evaluation_mode or not any(p.requires_grad for p in model.parameters()):
            prepared: nn.Module = self.prepare(model, device_placement=[device_placement])
            return prepared
        if device_placement or (device_placement is None and self.device_placement):
            model.to(self.device)
        if self.mixed_precision != "no":
            forward, casting = model.forward, partial(self._precision.casting, self.device, self._autocast)

            @functools.wraps(forward)
            def computing(*args: Any, **kwargs: Any) -> Any:
                with casting():
                    return cast_outputs(forward(*args, **kwargs), torch.float32)

            vars(model).update(_original_forward=forward, forward=computing)
        self._evaluated.append(model)
        return model

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Prepare one loader."""
        if slice_fn_for_dispatch is not None:
            raise RefusedError("slice_fn_for_dispatch is not honoured: dispatched batches are split along dimension 0")
        return self.prepare(data_loader, device_placement=[device_placement])

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Prepare one optimizer; after its models."""
        return self.prepare(optimizer, device_placement=[device_placement])

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare one scheduler; after its optimizer."""
        return self.prepare(scheduler)

    # -- the step

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """As `easymp.Accelerator.clip_grad_norm_`; inside a window it clips what this rank has summed up so far."""
        if self._window.accumulation == 1 or self._window.sync:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        clipped, sums = self._clipped_inside(parameters), self._prepared.sums
        if not sums.on:
            return self._prepared.strategy.clip(clipped, max_norm, norm_type)
        gradients = [gradient for p in clipped if (gradient := sums.gradient(p)) is not None]
        norm = nn.utils.get_total_norm(gradients, norm_type)
        for gradient in gradients:
            gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """As `easymp.Accelerator.clip_grad_value_`; inside a window it clamps what this rank has summed up so far."""
        if self._window.accumulation == 1 or self._window.sync:
            super().clip_grad_value_(parameters, clip_value)
            return
        clipped, sums = self._clipped_inside(parameters), self._prepared.sums
        self._gradients.clamp(clipped, clip_value)
        for gradient in map(sums.gradient, clipped) if sums.on else ():
            if gradient is not None:
                gradient.clamp_(-clip_value, clip_value)

    def _clipped_inside(self, parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
        if self._scaler.scales:
            raise StepError(
                "gradients are clipped once a window under a loss scale: write `if accelerator.sync_gradients:` before "
                "the clip"
            )
        return [parameters] if isinstance(parameters, Tensor) else list(parameters)

    @property
    def scaler(self) -> Any:
        """The loss scaler under fp16, else None."""
        return super().scaler if self._scaler.scales else None

    sync_gradients = GradientState.sync_gradients  # which a script may set, and reads `_window`, too

    # -- models and batches

    def free_memory(self, *objects: Any) -> list[None]:
        """As `easymp.Accelerator.free_memory`, but always returns a list."""
        for model in self._evaluated:
            extract_model_from_parallel(model, keep_fp32_wrapper=False)  # its own forward again
        self._evaluated.clear()
        super().free_memory(*objects)
        return [None] * len(objects)

    clear = free_memory

    unwrap_model = staticmethod(extract_model_from_parallel)  # type: ignore[assignment]  # any module

    def gather(self, tensor: Any) -> Any:
        """As `easymp.Accelerator.gather`; on one process tensors stay as they are, numbers too."""
        gathered = super().gather(tensor)
        return tensor if self.num_processes == 1 else gathered

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As easymp's. What that refuses (scalars, calls outside of loops) is gathered, with one warning."""
        try:
            return super().gather_for_metrics(input_data, use_gather_object)  # type: ignore[call-overload]  # a bool
        except BatchError as error:
            layer.ignore({"gather_for_metrics": f"nothing was taken out of what it gathered: {error}"})
        if use_gather_object or not any(isinstance(leaf, Tensor) for leaf in leaves(input_data)):
            return gather_object(input_data)
        return self.gather(input_data)

    # -- logging

    def init_trackers(
        self, project_name: str, config: Any = None, init_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """As `easymp.Accelerator.init_trackers`; options of trackers that this run does not have are left out."""
        super().init_trackers(project_name, config, self._of_this_run(init_kwargs))
        if not set(self._logbook.names) <= TRACKERS.keys():  # the script's own start here, as in Accelerate
            self._logbook.all()

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """As easymp's; in a run without trackers an object that takes every call and does nothing."""
        return super().get_tracker(name, unwrap) if self._logbook.names else SILENT

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """As easymp's; the script's own GeneralTrackers get values and step at once, as they were passed."""
        logbook, options = self._logbook, self._of_this_run(log_kwargs)
        logbook.check_open("log")
        scripts_own = [name for name, tracker in logbook.script_trackers.items() if getattr(tracker, "as_given", False)]
        for name in logbook.trackers.keys() & scripts_own:
            keywords = logbook.by_name(options, "log_kwargs").get(name, {})
            logbook.attempt(name, partial(logbook.trackers[name].log, values, step=step, **keywords), rows=1)
        if len(scripts_own) < len(logbook.names) or not scripts_own or logbook.run.parts.rows:
            super().log(values, step, options)

    def _of_this_run(self, options: Mapping[str, Any] | None) -> dict[str, Any]:
        absent = {tracker.value for tracker in records.LoggerType} - set(self._logbook.names)
        return {name: values for name, values in (options or {}).items() if str(name).lower() not in absent}

    # -- checkpoints

    def save_state(  # type: ignore[override]  # Accelerate's arguments
        self, output_dir: Path | None = None, safe_serialization: bool = True, **options: Any
    ) -> str:
        """As `easymp.Accelerator.save_state`; also on the main process alone, where no strategy shards the weights.

        With ``automatic_checkpoint_naming`` it is ``checkpoint_0``, ``checkpoint_1`` …, by `save_iteration`.
        """
        self._name_alone()
        with saving_between_micro_batches(self._window):
            if self.num_processes == 1 or self._save_calls.all_called():
                return super().save_state(output_dir=output_dir, safe_serialization=safe_serialization, **options)
            return self._save_alone(output_dir) if self.is_main_process else ""

    def load_state(  # type: ignore[override]  # Accelerate's arguments
        self, input_dir: Path | None = None, load_kwargs: Any = None, **options: Any
    ) -> Loaded:
        """As `easymp.Accelerator.load_state`; `map_location` has no effect."""
        if load_kwargs is not None:
            raise RefusedError(f"load_state(load_kwargs={load_kwargs!r}) is not honoured: leave it out")
        if options.pop("map_location", None) is not None:
            layer.ignore({"map_location": "each tensor is read to the device of the live one"})
        self._name_alone()
        return super().load_state(input_dir=input_dir, **options)

    def _name_alone(self) -> None:
        """Prepare a model of the parameters that optimizers step and no model has, so that checkpoints hold them."""
        stepped = [parameter for optimizer in self._prepared.optimizers for parameter in parameters_of(optimizer)]
        if alone := [p for p in dict.fromkeys(stepped) if self._prepared.owner.get(id(p)) == ALONE]:
            self.prepare(nn.ParameterList(alone))

    def _folder_name(self, step: int) -> str:
        if not self._project.automatic_checkpoint_naming:
            return super()._folder_name(step)
        name = f"checkpoint_{self.save_iteration}"
        if os.path.exists(folders.join(self._root, name)):
            remedy = "set ProjectConfiguration(iteration=…) to the next number"
            raise CheckpointError(f"{folders.join(self._root, name)} exists already: {remedy}")
        return name

    def save_model(
        self, model: nn.Module, save_directory: str | os.PathLike[str], max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:  # fmt: skip
        """As `easymp.Accelerator.save_model`; False writes ``pytorch_model.bin``, or shards of it and their index."""
        if self._sharded and self.num_processes > 1 and not self._save_calls.all_called():
            raise RefusedError(
                f"save_model() under `if accelerator.is_main_process:`: strategy {self.plan.strategy.value!r} shards "
                "the weights, and each rank sends its part. Take the call out of the condition, so that all ranks "
                "make it"
            )
        if safe_serialization:
            super().save_model(model, save_directory, max_shard_size)
            return
        state = self.get_state_dict(model)
        if self.is_main_process:
            torch_files.write_model(state, os.fspath(save_directory), max_shard_size)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """As `easymp.Accelerator.save`; False writes by torch.save what ``torch.load(weights_only=True)`` reads."""
        if safe_serialization:
            super().save(obj, f)
        elif self.is_main_process:
            torch_files.write(obj, f)

    def register_save_state_pre_hook(
        self, hook: Callable[[list[Any], list[dict[str, Any]], str], object]
    ) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` on every rank before each save.

        Weights that a hook on rank 0 removes from the list are not saved. Files that it writes into `output_dir`, an
        empty local folder, become part of the checkpoint. An error of a hook ends the save on all ranks.
        """
        handle = RemovableHandle(self._save_hooks)
        self._save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: Callable[[list[Any], str], object]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` on every rank before each load. Models that it takes out are not loaded."""
        handle = RemovableHandle(self._load_hooks)
        self._load_hooks[handle.id] = hook
        return handle

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Get a model's `state_dict` with whole tensors. All ranks call it if the model is sharded."""
        return export.get_state_dict(self._world, model, unwrap)

    # -- the run and its settings

    state = property(lambda self: AcceleratorState())
    gradient_state = property(lambda self: GradientState(self._window))
    trackers = property(lambda self: self._logbook.all())  # none on other processes than the main one

    def profile(self, profile_handler: records.ProfileKwargs | None = None) -> profiling.Profile:
        """As `easymp.Accelerator.profile`, by default with the ProfileKwargs of `kwargs_handlers`."""
        return super().profile(profile_handler or self._profiling)

    project_configuration = property(lambda self: self._project)
    logging_dir = property(lambda self: self._project.logging_dir)
    save_iteration = property(lambda self: self._project.iteration)
    dataloader_config = property(lambda self: self._loading)
    split_batches = property(lambda self: self._loading.split_batches)
    dispatch_batches = property(lambda self: self._loading.dispatch_batches)
    use_seedable_sampler = property(lambda self: self._loading.use_seedable_sampler)
    non_blocking = property(lambda self: self._loading.non_blocking)
    use_stateful_dataloader = property(lambda self: self._loading.use_stateful_dataloader)
    is_fsdp2 = property(lambda self: self.distributed_type == "FSDP")

    # Libraries set it around the preparation of a loader.
    even_batches = property(
        lambda self: self._loading.even_batches, lambda self, even: setattr(self._loading, "even_batches", even)
    )

    # -- what libraries ask

    @property
    def _models(self) -> list[nn.Module]:  # libraries ask whether there are any
        return [*(model.view for model in self._prepared.models), *self._evaluated]

    # Strategy and strategy_options say how models are split, no run here is DeepSpeed's, and fp8 is torch's own.
    parallelism_config = deepspeed_plugin = fp8_backend = property(lambda self: None)
