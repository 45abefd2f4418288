"""The engine: an Accelerator behind forward, backward and step."""

from __future__ import annotations

import copy
import os
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ...accelerator import Accelerator
from ...checkpoint import torch_files
from ...checkpoint.codec import unpack
from ...checkpoint.export import get_state_dict
from ...checkpoint.folders import open_checkpoint
from ...checkpoint.weights import load_weights
from ...distributed import read_ranks
from ...errors import EasympWarning, RefusedError, SettingError, StepError
from ...logging import get_logger
from ...optim import PreparedOptimizer
from ...options import AutocastKwargs, GradientAccumulationPlugin, GradScalerKwargs
from ...settings import Settings
from ...training.state import current_world
from ..layer import saving_between_micro_batches
from . import optimizers
from .config import DeepSpeedConfig, layer
from .modules import gradient_of, hide_gradients, mark_sharded, reveal_gradients

logger = get_logger(__name__)

COUNTERS, SCHEDULE = "state/object_0", "state/scheduler_0"  # in a checkpoint
# Strategy and options of each stage. Up to stage 2 each rank holds whole parameters, which scripts read and save.
STRATEGIES: Any = (("auto", None), ("zero1", None), ("zero1", {"shard_gradients": True}), ("fsdp", None))
# Methods that return the attribute of this name of the configuration.
GETTERS = frozenset(
    """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print gradient_clipping
    fp16_enabled bfloat16_enabled bf16_enabled loss_scale dynamic_loss_scale zero_optimization zero_optimization_stage
    zero_optimization_partition_gradients zero_cpu_offload optimizer_name optimizer_params scheduler_name
    scheduler_params initial_dynamic_scale dataloader_drop_last""".split()
)
TESTED_OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lion")  # DeepSpeed's own list for ZeRO
NAME_ONE = "name one in the configuration, or pass it to initialize()"


class InitializeError(SettingError, AssertionError):
    """Arguments of `initialize` that DeepSpeed refuses by an assertion."""


class Counters:
    """The engine's counters and the caller's own state, in every checkpoint."""

    NAMES = ("global_steps", "micro_steps", "skipped_steps", "global_samples", "client_state")

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine: Any = weakref.proxy(engine)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self._engine, name) for name in self.NAMES}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.NAMES:
            setattr(self._engine, name, state[name])


class EngineOptimizer(PreparedOptimizer):
    """A prepared optimizer that also tells the loss scale, by the names of DeepSpeed's optimizers and loss scalers."""

    trained: Sequence[Tensor]  # the model's parameters
    scale_factor = 2.0

    def follow(self, config: DeepSpeedConfig, parameters: Sequence[Tensor]) -> None:
        """Take the options of the loss scale from `config`."""
        self.trained = parameters
        self.dynamic_loss_scale = self.dynamic = config.fp16_enabled and config.dynamic_loss_scale
        self.scale_window = config.value("loss_scale_window", "fp16")
        self.min_scale = self.min_loss_scale = config.value("min_loss_scale", "fp16")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, hidden ones too, unless they are part of an unfinished update."""
        were_hidden = reveal_gradients(self.trained)
        super().zero_grad(set_to_none)
        if were_hidden:
            hide_gradients(self.trained)

    loss_scaler = loss_scale_config = property(lambda self: self)
    loss_scale = cur_scale = property(lambda self: self._scaler.get_scale())  # of the next backward; 1.0 without one
    cur_iter = property(lambda self: self.updates)
    overflow = property(lambda self: self.step_was_skipped)


class DeepSpeedEngine(nn.Module):
    """The engine that `initialize` returns; call it as the model. Its `accelerator`, an Accelerator, does the work."""

    def __init__(
        self, model: nn.Module, config: DeepSpeedConfig, optimizer: Any = None, parameters: Any = None,
        data: Any = None, scheduler: Any = None, collate: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.module, self._config, self.config = model, config, config.content
        self.accelerator = acc = _accelerator(config)
        self.device, self.world_size = acc.device, acc.num_processes
        self.global_rank, self.local_rank = acc.process_index, acc.local_process_index
        parameters = model.parameters() if parameters is None else parameters
        if optimizer is None and config.optimizer_name is not None:
            optimizer = optimizers.optimizer(config.optimizer_name, config.optimizer_params, parameters)
        elif optimizer is not None and not hasattr(optimizer, "step"):
            optimizer = optimizer(parameters)
        kind = type(optimizer).__name__
        checks = config.zero_enabled and config.content.get("zero_allow_untested_optimizer") is False
        if checks and optimizer is not None and kind not in TESTED_OPTIMIZERS:
            remedy = "zero_allow_untested_optimizer is false. Set it to true, or leave it out"
            raise InitializeError(f"You are using an untested ZeRO Optimizer, {kind}: {remedy}")
        if scheduler is None and config.scheduler_name is not None:
            scheduler = optimizers.scheduler(config.scheduler_name, config.scheduler_params)
        if scheduler is not None and optimizer is None:
            raise InitializeError(f"a scheduler without an optimizer: {NAME_ONE}")
        if scheduler is not None and not hasattr(scheduler, "step"):
            scheduler = scheduler(optimizer)
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise InitializeError("lr_scheduler drives another optimizer: pass that one, or a function that makes one")
        prepared_model, self.optimizer, self._schedule = acc.prepare(model, optimizer, scheduler)
        self._collate = collate
        self.training_dataloader = None if data is None else self.deepspeed_io(data)
        object.__setattr__(self, "_model", prepared_model)  # not a submodule: its parameters are the module's
        self.lr_scheduler = getattr(self._schedule, "scheduler", None)
        self._trained = tuple(model.parameters())
        if self.optimizer is not None:
            self.optimizer.__class__ = EngineOptimizer
            self.optimizer.follow(config, self._trained)
        if acc.plan.strategy.value == "fsdp":
            mark_sharded(self._trained)
        self.global_steps = self.micro_steps = self.skipped_steps = self.global_samples = 0
        self.client_state: dict[str, Any] = {}
        acc.register_for_checkpointing(Counters(self))
        self._micro_step: AbstractContextManager[None] | None = None
        self._micro_batches = 0  # since the last update
        self._norm: Tensor | None = None
        self._called_backward = False  # since the last step
        self._step_applied = False
        # Whether `backward` averages gradients at the boundary, and not the strategy while backward runs. So several
        # backward passes before a step, and parameters without a gradient, are right. Sharded gradients take both
        # anyway; the Accelerator averages sums of low-precision gradients.
        has_low_weights = any(p.dtype in (torch.float16, torch.bfloat16) for p in self._trained)
        sums_are_averaged = config.gradient_accumulation_steps > 1 and has_low_weights
        shards_gradients = config.zero_optimization_partition_gradients
        self._averages_at_boundary = self.world_size > 1 and not shards_gradients and not sums_are_averaged

    # -- the step

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's outputs, in its own precision; floating-point inputs are cast to it."""
        if not (self.training and torch.is_grad_enabled() and self.optimizer is not None):
            return self._model(*inputs, **kwargs)
        self._begin_micro_step()
        with self._unsynced():
            return self._model(*inputs, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Compute the gradients of `loss`, divided by the accumulation steps; returns the divided loss."""
        if self.optimizer is None:
            raise StepError(f"backward() on an engine without an optimizer: {NAME_ONE}")
        self._begin_micro_step()
        acc, config = self.accelerator, self._config
        steps = config.gradient_accumulation_steps
        loss = loss if scale_wrt_gas else loss * steps
        reveal_gradients(self._trained)
        acc._gradients.accept()  # the script and `safe_set_full_grad` may change scaled ones
        with self._unsynced():
            acc.backward(loss, retain_graph=retain_graph)
            if self._averages_at_boundary and acc.sync_gradients:
                current_world().average_(self._fill_gradients())
                acc._gradients.watch()  # a change of ours
        if config.zero_optimization_partition_gradients:
            hide_gradients(self._trained)
        self._called_backward = True
        return loss.detach() / steps

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; on the last one of an update also clip, and step the optimizer and the scheduler."""
        if not self._called_backward:
            raise StepError("engine.step() before a backward: call engine.backward(loss), not loss.backward()")
        self._called_backward = False
        acc, config = self.accelerator, self._config
        updates = acc.sync_gradients
        if updates:
            reveal_gradients(self._trained)
            self._fill_gradients()
            acc._gradients.accept()
            self._norm = acc.clip_grad_norm_(self._model.parameters(), config.gradient_clipping or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        skipped = updates and acc.optimizer_step_was_skipped
        self._step_applied = updates and not skipped
        if self._step_applied and self._schedule is not None:
            self._schedule.step(**(lr_kwargs or {}))
        self._end_micro_step()
        self.micro_steps += 1
        self.global_steps += updates
        self.skipped_steps += skipped
        self.global_samples += config.train_batch_size if updates else 0
        self._micro_batches = 0 if updates else self._micro_batches + 1
        if updates and config.steps_per_print and self.global_steps % config.steps_per_print == 0:
            counts = self.global_steps, self.skipped_steps
            logger.info("step=%d, skipped=%d, lr=%s, mom=%s", *counts, self.get_lr(), self.get_mom())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters."""
        reveal_gradients(self._trained)
        self.module.zero_grad(set_to_none)

    def _begin_micro_step(self) -> None:
        if self._micro_step is None:
            self._micro_step = self.accelerator.accumulate(self._model)
            self._micro_step.__enter__()

    def _end_micro_step(self) -> None:
        if self._micro_step is not None:
            self._micro_step.__exit__(None, None, None)
            self._micro_step = None

    def _unsynced(self) -> AbstractContextManager[None]:
        return self.accelerator.no_sync(self._model) if self._averages_at_boundary else nullcontext()

    def _fill_gradients(self) -> list[Tensor]:
        """All gradients; a parameter without one takes part with zeros, as in DeepSpeed, so that it decays."""
        gradients = []
        for parameter in self._trained:
            if parameter.requires_grad and gradient_of(parameter) is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        return gradients

    # -- what the engine tells

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this micro-batch is the last one of an update."""
        return self._micro_batches + 1 >= self._config.gradient_accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples of an update, those of a micro-batch on one rank, and micro-batches of an update."""
        config = self._config
        return config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps

    def was_step_applied(self) -> bool:
        """Whether the last `step` updated the weights."""
        return self._step_applied

    def get_global_grad_norm(self) -> float | None:
        """Norm of the gradients of the last update, before the clip."""
        return None if self._norm is None else float(self._norm)

    def get_lr(self) -> list[float]:
        """The learning rate of each param group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups] if self.optimizer else []

    def get_mom(self) -> list[Any]:
        """The betas or the momentum of each param group."""
        groups = self.optimizer.param_groups if self.optimizer else []
        return [group.get("betas", group.get("momentum")) for group in groups]

    def __getattr__(self, name: str) -> Any:
        """Getters of the configuration, and the attributes of the user's model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in GETTERS:
                return partial(getattr, self._config, name)
            if hasattr(module := self.__dict__.get("_modules", {}).get("module"), name):
                return getattr(module, name)
            if name in layer.members:
                raise AttributeError(f"{name} is not part of easymp.compat: {layer.members[name]}") from None
            raise

    # -- what scripts change

    def compile(self, backend: Any = None, compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """torch.compile of the model, in place."""
        self.module.compile(**({"backend": backend} if backend else {}), **(compile_kwargs or {}))

    def empty_partition_cache(self) -> None:
        """Do nothing: weights are gathered for a block at a time."""

    def deepspeed_io(self, dataset: Any, batch_size: int | None = None, collate_fn: Any = None) -> Any:
        """A prepared loader of `dataset`; for other options pass a DataLoader to ``engine.accelerator.prepare``."""
        size, collate = batch_size or self._config.train_micro_batch_size_per_gpu, collate_fn or self._collate
        drop_last = self._config.dataloader_drop_last
        loader: DataLoader[Any] = DataLoader(dataset, size, shuffle=True, collate_fn=collate, drop_last=drop_last)
        return self.accelerator.prepare(loader)

    def destroy(self) -> None:
        """Close the run; another engine can be made afterwards."""
        self._end_micro_step()
        self.accelerator.close()

    # -- weights and checkpoints

    def module_state_dict(
        self, destination: Any = None, prefix: str = "", keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """The module's own state dict."""
        state: dict[str, Any] = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        return self._without_frozen(state, prefix) if exclude_frozen_parameters else state

    def _without_frozen(self, state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        frozen = {prefix + name for name, p in self.module.named_parameters() if not p.requires_grad}
        return {name: value for name, value in state.items() if name not in frozen}

    def save_16bit_model(
        self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:  # fmt: skip
        """Write whole weights to one file of torch.save, or of safetensors by its name's end; on all ranks."""
        save_dir = _nonempty(save_dir)
        state = get_state_dict(self.accelerator._world, self._model)
        if self.global_rank == 0:
            state = self._without_frozen(state) if exclude_frozen_parameters else state
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            write: Any = self.accelerator.save if save_filename.endswith(".safetensors") else torch_files.write
            write(state, Path(save_dir, save_filename))
        self.accelerator.wait_for_everyone()
        return True

    save_fp16_model = save_16bit_model

    def save_checkpoint(
        self, save_dir: str | os.PathLike[str], tag: str | None = None, client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True, exclude_frozen_parameters: bool = False,
    ) -> bool:  # fmt: skip
        """Write a checkpoint to ``save_dir/tag``, a path or URL, and `tag` to ``save_dir/latest``; on all ranks."""
        if exclude_frozen_parameters:
            raise RefusedError("exclude_frozen_parameters=True: only save_16bit_model takes it")
        save_dir = _nonempty(save_dir)
        tag = f"global_step{self.global_steps}" if tag is None else current_world().broadcast_objects([str(tag)])[0]
        self.client_state = dict(client_state or {})
        with saving_between_micro_batches(self.accelerator._window):
            self.accelerator.save_state(os.path.join(save_dir, tag))  # a Path would break a URL
        if save_latest and self.global_rank == 0:
            temporary = Path(save_dir, "latest.tmp")
            temporary.write_text(tag, encoding="utf-8")
            temporary.replace(Path(save_dir, "latest"))
        self.accelerator.wait_for_everyone()
        return True

    def load_checkpoint(
        self, load_dir: str | os.PathLike[str], tag: str | None = None, load_module_strict: bool = True,
        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True, load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, Any]:  # fmt: skip
        """Load a checkpoint; returns its path and `client_state`, or (None, None) with a warning without ``latest``."""
        if custom_load_fn is not None:
            remedy = "call it with the weights of get_fp32_state_dict_from_zero_checkpoint(load_dir)"
            raise RefusedError(f"load_checkpoint(custom_load_fn=…): {remedy}")
        latest = Path(load_dir, "latest")
        if tag is None and not latest.is_file():
            message = f"Unable to find latest file at {latest}: pass the folder of save_checkpoint, or a tag"
            warnings.warn(message, EasympWarning, stacklevel=2)
            return None, None
        tag = latest.read_text(encoding="utf-8").strip() if tag is None else str(tag)
        path = os.path.join(load_dir, tag)
        self._end_micro_step()  # and forget the gradients of an unfinished update
        window = self.accelerator._window
        window.micro, window.backwards, window.sync = 0, 0, True
        self._micro_batches, self._called_backward = 0, False
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        if load_module_only or not load_optimizer_states:
            states = _read_states(path)
            load_weights(self._model, path, strict=load_module_strict)
            if load_module_only:
                return path, states[COUNTERS]["client_state"]
            Counters(self).load_state_dict(states[COUNTERS])
            if load_lr_scheduler_states and self._schedule is not None and SCHEDULE in states:
                self._schedule.load_state_dict(states[SCHEDULE])
            return path, self.client_state
        schedule = None if load_lr_scheduler_states else self._schedule
        schedule_state = copy.deepcopy(schedule.state_dict()) if schedule is not None else None
        self.accelerator.load_state(path, strict=load_module_strict)
        if schedule is not None:
            schedule.load_state_dict(schedule_state)
        return path, self.client_state


def _nonempty(save_dir: str | os.PathLike[str]) -> str:
    if not os.fspath(save_dir):
        raise SettingError("save_dir is an empty path: pass a folder, or '.' for the working directory")
    return os.fspath(save_dir)


def _read_states(path: str) -> dict[str, Any]:
    """Counters and schedule of a checkpoint."""

    def refuse_tensor(name: str) -> Any:
        raise RefusedError(f"{name} is a tensor, which is read with the optimizer's states: load all")

    states = open_checkpoint(path).manifest.states
    return {name: unpack(states[name], refuse_tensor) for name in (COUNTERS, SCHEDULE) if name in states}


def _accelerator(config: DeepSpeedConfig) -> Accelerator:
    strategy, options = STRATEGIES[config.zero_optimization_stage if read_ranks().size > 1 else 0]
    if strategy == "fsdp":
        options = {"cpu_offload": config.zero_cpu_offload}
    elif config.zero_cpu_offload:
        config.ignored["zero_optimization.offload_…"] = "with stage 3 on several processes only"
    scaling = GradScalerKwargs(**config.scaler_options()) if config.fp16_enabled else None
    windows = GradientAccumulationPlugin(config.gradient_accumulation_steps, sync_with_dataloader=False)
    return Accelerator(
        mixed_precision=config.precision,  # type: ignore[arg-type]  # a word of the configuration's
        strategy=strategy,
        strategy_options=options,
        gradient_accumulation_steps=windows,
        nonfinite="skip" if config.skips_nonfinite else None,
        settings=Settings(autocast_options=AutocastKwargs(output_dtype=None), scaler_options=scaling),
    )
