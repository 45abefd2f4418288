"""The engine: an Accelerator behind forward, backward and step."""

from __future__ import annotations

import copy
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import index
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ...accelerator import Accelerator
from ...base.pytree import leaves
from ...checkpoint import torch_files
from ...checkpoint.codec import unpack
from ...checkpoint.folders import open_checkpoint
from ...checkpoint.huggingface import get_state_dict
from ...checkpoint.weights import load_weights
from ...distributed import read_ranks
from ...errors import EasympWarning, RefusedError, SettingError, StepError
from ...logging import get_logger
from ...optim import PreparedOptimizer
from ...options import AutocastKwargs, GradientAccumulationPlugin, GradScalerKwargs
from ...settings import Settings
from ...training.state import current_world
from . import optimizers
from .config import DeepSpeedConfig, layer, nonempty_folder
from .modules import PARTITIONED_GRADS, gradient_of, hide_gradients, mark_sharded, reveal_gradients

logger = get_logger(__name__)

COUNTERS, SCHEDULE = "state/object_0", "state/scheduler_0"  # in a checkpoint
# Stage → strategy and options. Up to stage 2 each rank holds whole parameters, which scripts read and save.
STRATEGIES: dict[int, tuple[str, dict[str, Any] | None]] = {
    0: ("auto", None),
    1: ("zero1", None),
    2: ("zero1", {"shard_gradients": True}),
    3: ("fsdp", None),
}
NATIVE = """
acc = Accelerator(mixed_precision={0.precision!r}, strategy={1!r}, gradient_accumulation_steps={3})
model, optimizer, loader = acc.prepare(model, optimizer, loader)
for inputs, targets in loader:
    with acc.accumulate(model):
        acc.backward(loss_fn(model(inputs), targets))  # engine.backward
        acc.clip_grad_norm_(model.parameters(), {2})   # gradient_clipping
        optimizer.step()                               # engine.step
        optimizer.zero_grad()
acc.save_state()                                       # engine.save_checkpoint
"""
# Methods that return the attribute of this name of the configuration.
GETTERS = frozenset(
    """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print gradient_clipping
    dataloader_drop_last fp16_enabled fp16_auto_cast bfloat16_enabled bf16_enabled torch_autocast_enabled
    loss_scale dynamic_loss_scale initial_dynamic_scale zero_optimization zero_optimization_stage
    zero_optimization_partition_gradients zero_optimization_partition_weights zero_cpu_offload optimizer_name
    optimizer_params scheduler_name scheduler_params""".split()
)
TESTED_OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lion")  # DeepSpeed's own list for ZeRO
NAME_ONE = "name one in the configuration, or pass it to initialize()"


class EngineError(StepError, AssertionError):
    """A call in the wrong place, which DeepSpeed refuses by an assertion."""


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
    dynamic_loss_scale = dynamic = False
    scale_window, min_scale, scale_factor = 1000, 1.0, 2.0

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

    @property
    def loss_scaler(self) -> EngineOptimizer:
        return self

    loss_scale_config = loss_scaler

    @property
    def cur_scale(self) -> float:
        """The loss scale of the next backward; 1.0 without one."""
        return self._scaler.get_scale()

    loss_scale = cur_scale

    @property
    def cur_iter(self) -> int:
        return self.updates

    @property
    def overflow(self) -> bool:
        return self.step_was_skipped

    @property  # type: ignore[misc]  # for isinstance(optimizer, FusedAdam)
    def __class__(self) -> type:
        """The class of the optimizer that the script passed or named."""
        return type(self.optimizer)


class DeepSpeedEngine(nn.Module):
    """The engine that `initialize` returns; call it as the model. Its `accelerator`, an Accelerator, does the work."""

    def __init__(
        self, model: nn.Module, config: DeepSpeedConfig, optimizer: Any = None, parameters: Any = None,
        data: Any = None, scheduler: Any = None, collate: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.module, self._config, self.config = model, config, config.content
        layer.ignore(config.ignored)
        self.accelerator = acc = _accelerator(config)
        self.device, self.world_size = acc.device, acc.num_processes
        self.global_rank, self.local_rank = acc.process_index, acc.local_process_index
        choices = acc.plan.strategy.value, config.gradient_clipping or None, config.gradient_accumulation_steps
        layer.use("initialize, backward and step", NATIVE.format(config, *choices))
        optimizer = self._make_optimizer(optimizer, model.parameters() if parameters is None else parameters)
        scheduler = self._make_scheduler(scheduler, optimizer)
        self._collate = collate
        loader = None if data is None else self._loader(data, config.train_micro_batch_size_per_gpu, collate)
        prepared_model, self.optimizer, self._schedule, self.training_dataloader = acc.prepare(
            model, optimizer, scheduler, loader
        )
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
        self._called_scale = False
        self._in_backward = False  # of the engine
        self._in_own_backward = False  # of the script
        self._in_no_sync = False
        self._step_applied = False
        self._has_low_weights = any(p.dtype in (torch.float16, torch.bfloat16) for p in self._trained)

    def _make_optimizer(self, optimizer: Any, parameters: Any) -> Any:
        config = self._config
        if optimizer is None and config.optimizer_name is not None:
            optimizer = optimizers.optimizer(config.optimizer_name, config.optimizer_params or {}, parameters)
        elif optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = optimizer(parameters)
        kind = type(optimizer).__name__
        checks = config.zero_enabled and config.content.get("zero_allow_untested_optimizer") is False
        if checks and optimizer is not None and kind not in TESTED_OPTIMIZERS:
            remedy = "zero_allow_untested_optimizer is false. Set it to true, or leave it out"
            raise InitializeError(f"You are using an untested ZeRO Optimizer, {kind}: {remedy}")
        return optimizer

    def _make_scheduler(self, scheduler: Any, optimizer: Any) -> Any:
        config = self._config
        if scheduler is None and config.scheduler_name is not None:
            scheduler = optimizers.scheduler(config.scheduler_name, config.scheduler_params or {})
        if scheduler is None:
            return None
        if optimizer is None:
            raise InitializeError(f"a scheduler without an optimizer: {NAME_ONE}")
        if not hasattr(scheduler, "step"):
            scheduler = scheduler(optimizer)
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            remedy = "pass that one too, or a function that makes the scheduler"
            raise InitializeError(f"lr_scheduler drives another optimizer: {remedy}")
        return scheduler

    # -- the step

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's outputs, in its own precision; floating-point inputs are cast to it."""
        if not (self.training and torch.is_grad_enabled() and self.optimizer is not None):
            return self._model(*inputs, **kwargs)
        self._begin_micro_step()
        with self._unsynced():
            outputs = self._model(*inputs, **kwargs)
        self._in_own_backward = False
        for leaf in leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self._output_gradient)
        return outputs

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Compute the gradients of `loss`, divided by the accumulation steps; returns the divided loss."""
        if self.optimizer is None:
            raise EngineError(f"backward() on an engine without an optimizer: {NAME_ONE}")
        self._begin_micro_step()
        acc, steps = self.accelerator, self._config.gradient_accumulation_steps
        loss = loss if scale_wrt_gas else loss * steps
        self._in_backward = True
        reveal_gradients(self._trained)
        acc._prepared.forget_gradients()  # the script and `safe_set_full_grad` may change scaled ones
        try:
            with self._unsynced():
                acc.backward(loss, retain_graph=retain_graph)
                if self._averages_at_boundary and acc.sync_gradients and not self._in_no_sync:
                    current_world().average_(self._fill_gradients())
                    acc._prepared.note_gradients()  # a change of ours
            if self._config.zero_optimization_partition_gradients:
                hide_gradients(self._trained)
        finally:
            self._in_backward = False
        self._called_backward = True
        return loss.detach() / steps

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; on the last one of an update also clip, and step the optimizer and the scheduler."""
        if self._in_no_sync:
            raise EngineError("It is illegal to call Engine.step() inside no_sync context manager: step after it")
        if not self._called_backward:
            self._finish_own_backward()
        self._called_backward = self._called_scale = False
        acc, config = self.accelerator, self._config
        updates = acc.sync_gradients
        if updates:
            reveal_gradients(self._trained)
            self._fill_gradients()
            acc._prepared.forget_gradients()
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

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the loss scale, for ``engine.scale(loss).backward()``."""
        self._called_scale = True
        return self.accelerator.scaler.scale(loss) if self.accelerator.scaler.scales else loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients stay on this rank, and no step is made; refused at stages 2 and 3."""
        if self._config.zero_optimization_partition_gradients:
            raise EngineError("no_sync context manager: stages 2 and 3 reduce at each backward. Leave it out")
        if self._in_no_sync:
            raise EngineError("no_sync context manager reentry is unsupported: leave the inner one out")
        self._in_no_sync = True
        try:
            with self.accelerator.no_sync(self._model):
                yield
        finally:
            self._in_no_sync = False

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

    @property
    def _averages_at_boundary(self) -> bool:
        """Whether `backward` averages gradients at the boundary, and not the strategy while backward runs.

        So several backward passes before a step, and parameters without a gradient, are right. Sharded gradients take
        both anyway; the Accelerator averages sums of low-precision gradients.
        """
        config = self._config
        summed = config.gradient_accumulation_steps > 1 and self._has_low_weights
        return self.world_size > 1 and not config.zero_optimization_partition_gradients and not summed

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

    # -- a backward of the script's own

    def _output_gradient(self, gradient: Tensor | None) -> Tensor | None:
        """Hook of an output: divides its gradient (None without use) in the script's own backward, and follows that."""
        if self._in_backward:
            return gradient
        if not self._in_own_backward:
            self._in_own_backward = True
            reveal_gradients(self._trained)
            self.optimizer.backward_begins()
            self.accelerator._prepared.sums.begin()
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(self._after_own_backward))  # behind the callbacks of the strategy
        steps = self._config.gradient_accumulation_steps
        return gradient if gradient is None or steps == 1 else gradient / steps

    def _after_own_backward(self) -> None:
        """Average gradients after the last backward of an update, or hide them."""
        self._in_own_backward = False
        if self.accelerator.sync_gradients and not self._in_no_sync and not self._lacks_scale:
            with torch.enable_grad():
                self._backward_of_zero()
        elif self._config.zero_optimization_partition_gradients:
            hide_gradients(self._trained)

    def _finish_own_backward(self) -> None:
        """In a step without `backward`: hand over the gradients of the script's own backward, or those that it set."""
        if self._micro_step is None:
            if all(p.grad is None and p not in PARTITIONED_GRADS for p in self._trained):
                raise EngineError("engine.step() before a backward: call engine(…) and backward(loss) first")
            self._begin_micro_step()
            self._called_scale = True  # gradients that the script set, times the loss scale
        if self._lacks_scale:
            raise StepError("loss.backward() leaves the loss scale out: engine.scale(loss).backward()")
        self._backward_of_zero()

    @property
    def _lacks_scale(self) -> bool:
        """Whether the script's own backward left the loss scale out."""
        return self.accelerator.scaler.scales and not self._called_scale

    def _backward_of_zero(self) -> None:
        """Hand the gradients to the Accelerator by a backward that adds nothing."""
        self.backward(torch.zeros((), device=self.device, requires_grad=True))

    # -- what the engine tells

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this micro-batch is the last one of an update."""
        return self._micro_batches + 1 >= self._config.gradient_accumulation_steps

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

    def get_batch_info(self) -> tuple[int, int, int]:
        """`train_batch_size`, `train_micro_batch_size_per_gpu` and `gradient_accumulation_steps`."""
        config = self._config
        return config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps

    def __getattr__(self, name: str) -> Any:
        """Getters of the configuration, and the attributes of the user's model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in GETTERS:
                return partial(getattr, self._config, name)
            if hasattr(module := self.__dict__.get("_modules", {}).get("module"), name):
                return getattr(module, name)
            raise

    # -- what scripts change

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the samples of an update, by the number of micro-batches."""
        config = self._config
        micro, world = config.train_micro_batch_size_per_gpu, self.world_size
        steps, remainder = divmod(index(train_batch_size), micro * world)
        if remainder or steps < 1:
            raise ValueError(f"train_batch_size={train_batch_size} is not {micro} × {world} × n")
        self.accelerator.gradient_accumulation_steps = steps
        config.train_batch_size, config.gradient_accumulation_steps = train_batch_size, steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Refused: updates come by the number of micro-batches."""
        raise RefusedError("set_gradient_accumulation_boundary: call step() after each micro-batch; the last updates")

    def compile(self, backend: Any = None, compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """torch.compile of the model, in place."""
        self.module.compile(**({"backend": backend} if backend else {}), **(compile_kwargs or {}))

    def empty_partition_cache(self) -> None:
        """Do nothing: weights are gathered for a block at a time."""

    def deepspeed_io(self, dataset: Any, batch_size: int | None = None, collate_fn: Any = None) -> Any:
        """A prepared loader of `dataset`; for other options pass a DataLoader to ``engine.accelerator.prepare``."""
        size = batch_size or self._config.train_micro_batch_size_per_gpu
        return self.accelerator.prepare(self._loader(dataset, size, collate_fn or self._collate))

    def _loader(self, data: Any, size: int, collate: Any) -> DataLoader[Any]:
        drop_last = self._config.dataloader_drop_last
        return DataLoader(data, batch_size=size, shuffle=True, collate_fn=collate, drop_last=drop_last)

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
        return self._without_frozen(state) if exclude_frozen_parameters else state

    def load_module_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load ``checkpoint["module"]`` into the module."""
        self.module.load_state_dict(checkpoint["module"], strict=strict)

    def _without_frozen(self, state: dict[str, Any]) -> dict[str, Any]:
        frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        return {name: value for name, value in state.items() if name not in frozen}

    def save_16bit_model(
        self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:  # fmt: skip
        """Write whole weights to one file of torch.save, or of safetensors by its name's end; on all ranks."""
        save_dir = nonempty_folder(save_dir, "save_16bit_model")
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
        save_dir = nonempty_folder(save_dir, "save_checkpoint")
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        validation = self._config.value("tag_validation", "checkpoint").lower()
        if validation != "ignore" and len(tags := dict.fromkeys(current_world().gather_objects(tag))) > 1:
            message = f"the tag of save_checkpoint differs between ranks: {', '.join(tags)}. Pass one on all ranks"
            if validation == "fail":
                raise EngineError(message)
            warnings.warn(f"{message}; rank 0's counts", EasympWarning, stacklevel=2)
        self.client_state = dict(client_state or {})
        window = self.accelerator._window
        sync, window.sync = window.sync, True  # saves between two micro-batches, too
        try:
            self.accelerator.save_state(os.path.join(save_dir, tag))  # a Path would break a URL
        finally:
            window.sync = sync
        if save_latest and self.global_rank == 0:
            temporary = Path(save_dir, "latest.tmp")
            temporary.write_text(tag, encoding="utf-8")
            temporary.replace(Path(save_dir, "latest"))
        self.accelerator.wait_for_everyone()
        return True

    def load_checkpoint(
        self, load_dir: str | os.PathLike[str], tag: str | None = None, load_module_strict: bool = True,
        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True, load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, Any]:  # fmt: skip
        """Load a checkpoint; returns its path and `client_state`, or (None, None) with a warning without ``latest``."""
        if custom_load_fn is not None:
            raise RefusedError("custom_load_fn=…: use easymp.load_weights(engine.module, path)")
        latest = Path(load_dir, "latest")
        if tag is None and not latest.is_file():
            message = f"Unable to find latest file at {latest}: pass the folder of save_checkpoint, or a tag"
            warnings.warn(message, EasympWarning, stacklevel=2)
            return None, None
        tag = latest.read_text(encoding="utf-8").strip() if tag is None else str(tag)
        path = os.path.join(load_dir, tag)
        self._drop_gradients()
        if load_module_only:
            load_weights(self._model, path, strict=load_module_strict)
            return path, _read_states(path)[COUNTERS]["client_state"]
        if not load_optimizer_states:
            states = _read_states(path)
            load_weights(self._model, path, strict=load_module_strict)
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

    def _drop_gradients(self) -> None:
        """Forget the gradients of an unfinished update."""
        self._end_micro_step()
        window = self.accelerator._window
        window.micro, window.backwards, window.sync = 0, 0, True
        self._micro_batches, self._called_backward = 0, False
        reveal_gradients(self._trained)
        if self.optimizer is not None:
            self.optimizer.zero_grad()


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
        layer.ignore({"zero_optimization.offload_…": "with stage 3 on several processes only"})
    settings = Settings(
        autocast_options=AutocastKwargs(output_dtype=None),
        scaler_options=GradScalerKwargs(**config.scaler_options()) if config.fp16_enabled else None,
    )
    return Accelerator(
        mixed_precision=config.precision,  # type: ignore[arg-type]  # a word of `_read_precision`
        strategy=strategy,  # type: ignore[arg-type]  # a word of `STRATEGIES`
        strategy_options=options,
        gradient_accumulation_steps=GradientAccumulationPlugin(
            config.gradient_accumulation_steps, sync_with_dataloader=False
        ),
        nonfinite="skip" if config.skips_nonfinite else None,
        settings=settings,
    )
