"""The engine: an Accelerator behind forward, backward and step."""

from __future__ import annotations

import copy
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from operator import index
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from ...accelerator import Accelerator
from ...base.pytree import leaves
from ...checkpoint.codec import unpack
from ...checkpoint.folders import open_checkpoint
from ...checkpoint.weights import load_weights
from ...distributed import read_ranks
from ...errors import EasympWarning, RefusedError, SettingError, StepError
from ...logging import get_logger
from ...optim import PreparedOptimizer
from ...options import AutocastKwargs, GradientAccumulationPlugin, GradScalerKwargs
from ...training.state import current_world
from . import optimizers
from .config import ANSWERED_FALSE, ANSWERS, REFUSED, Config, layer

logger = get_logger(__name__)

COUNTERS, SCHEDULE = "state/object_0", "state/scheduler_0"  # in a checkpoint
# Up to stage 2 each rank holds whole parameters, which scripts read and save.
STRATEGIES: dict[int, tuple[str, dict[str, Any] | None]] = {
    0: ("auto", None),
    1: ("zero1", None),
    2: ("zero1", {"shard_gradients": True}),
    3: ("fsdp", None),
}
NATIVE = """
acc = Accelerator(mixed_precision={0.precision!r}, strategy={1!r}, gradient_accumulation_steps={0.batch.steps})
model, optimizer, loader = acc.prepare(model, optimizer, loader)
for inputs, targets in loader:
    with acc.accumulate(model):
        acc.backward(loss_fn(model(inputs), targets))  # engine.backward
        acc.clip_grad_norm_(model.parameters(), {2})   # gradient_clipping
        optimizer.step()                               # engine.step
        optimizer.zero_grad()
acc.save_state()                                       # engine.save_checkpoint
"""
# What the engine tells by attributes, and by methods without arguments, beside those in `config.ANSWERS`.
VALUES: dict[str, Callable[[Any], Any]] = {
    "device": lambda engine: engine.accelerator.device,
    "local_rank": lambda engine: engine.accelerator.local_process_index,
    "global_rank": lambda engine: engine.accelerator.process_index,
    "is_compiled": lambda engine: engine.module._compiled_call_impl is not None,
    **dict.fromkeys(("world_size", "dp_world_size"), lambda engine: engine.accelerator.num_processes),
}
COUNTED = ("global_steps", "micro_steps", "skipped_steps", "global_samples")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "": torch.float32}
METHODS: dict[str, Callable[[Any], Any]] = {
    "train_batch_size": lambda engine: engine._config.batch.train,
    "train_micro_batch_size_per_gpu": lambda engine: engine._config.batch.micro,
    "gradient_accumulation_steps": lambda engine: engine._config.batch.steps,
    "get_batch_info": lambda engine: engine._config.batch[:3],
    "is_gradient_accumulation_boundary": lambda engine: engine._in_window + 1 >= engine._config.batch.steps,
    "was_step_applied": lambda engine: engine._applied,
    "get_global_grad_norm": lambda engine: None if engine._norm is None else float(engine._norm),
    "get_lr": lambda engine: [float(group["lr"]) for group in engine._groups()],
    "get_mom": lambda engine: [group.get("betas", group.get("momentum")) for group in engine._groups()],
    "get_data_types": lambda engine: (DTYPES[engine._config.half], torch.float32),
    "get_data_parallel_rank": lambda engine: engine.global_rank,
    **dict.fromkeys(("get_model_parallel_rank", "get_tensor_parallel_rank"), lambda engine: 0),
    "fp16_enabled": lambda engine: engine._config.half == "fp16",
    "bfloat16_enabled": lambda engine: engine._config.half == "bf16",
    "dynamic_loss_scale": lambda engine: engine.loss_scale() == 0,
    "initial_dynamic_scale": lambda engine: 2 ** engine._config.value("initial_scale_power", "fp16"),
    "postscale_gradients": lambda engine: not engine._config.value("prescale_gradients"),
    "zero_optimization": lambda engine: engine._config.stage > 0,
    "zero_optimization_stage": lambda engine: engine._config.stage,
    "zero_optimization_partition_gradients": lambda engine: engine._config.stage >= 2,
    "zero_optimization_partition_weights": lambda engine: engine._config.stage >= 3,
    "zero_cpu_offload": lambda engine: engine._config.offload,
    "optimizer_name": lambda engine: (engine._config.optimizer or (None,))[0],
    "optimizer_params": lambda engine: (engine._config.optimizer or (None, None))[1],
    "scheduler_name": lambda engine: (engine._config.scheduler or (None,))[0],
    "scheduler_params": lambda engine: (engine._config.scheduler or (None, None))[1],
}
NAME_ONE = "name one in the configuration, or pass it to initialize()"


class EngineError(StepError, AssertionError):
    """A call in the wrong place, which DeepSpeed refuses by an assertion."""


class InitializeError(SettingError, AssertionError):
    """Arguments of `initialize` that DeepSpeed refuses by an assertion."""


class Counters(SimpleNamespace):
    """The engine's counters and the caller's own state; in every checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class EngineOptimizer(PreparedOptimizer):
    """A prepared optimizer that also tells the loss scale, by DeepSpeed's names."""

    @property
    def cur_scale(self) -> float:
        """The loss scale of the next backward; 1.0 without one."""
        return self._scaler.get_scale()

    loss_scale = cur_scale

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """For `isinstance`: scripts ask for the class of the optimizer that they passed or named."""
        return type(self.optimizer)

    @property
    def overflow(self) -> bool:
        return self.step_was_skipped


class DeepSpeedEngine(nn.Module):
    """The engine that `initialize` returns; call it as the model.

    Attributes:
        module, config: the user's model, and the configuration as it was given.
        optimizer, training_dataloader: prepared, or None.
        lr_scheduler: itself, or None.
        accelerator: the Accelerator that does the work.
        global_steps, micro_steps, skipped_steps, global_samples: updates, micro-batches, updates that an overflow skipped, samples.

    `VALUES`, `METHODS` and ``names.toml`` have further attributes and methods.
    """

    def __init__(
        self, model: nn.Module, config: Config, optimizer: Any = None, parameters: Any = None, data: Any = None,
        scheduler: Any = None, collate: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.module, self._config, self.config = model, config, config.content
        self.client_optimizer, self.client_lr_scheduler = optimizer, scheduler
        layer.ignore(config.ignored)
        self.accelerator = acc = _accelerator(config)
        native = NATIVE.format(config, acc.plan.strategy.value, config.clip or None)
        layer.use("initialize, backward and step", native)
        given = parameters if parameters is not None else model.parameters()
        if optimizer is None and config.optimizer is not None:
            optimizer = optimizers.optimizer(*config.optimizer, given)
        elif optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = optimizer(given)
        if scheduler is None and config.scheduler is not None:
            scheduler = optimizers.scheduler(*config.scheduler)
        if scheduler is not None and optimizer is None:
            raise InitializeError(f"a scheduler without an optimizer: {NAME_ONE}")
        if scheduler is not None and not hasattr(scheduler, "step"):
            scheduler = scheduler(optimizer)
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise InitializeError(
                "lr_scheduler drives another optimizer: pass that one too, or a function that makes the scheduler"
            )
        self.basic_optimizer, self._collate = optimizer, collate
        loader = None if data is None else self._loader(data, config.batch.micro, collate)
        prepared = acc.prepare(model, optimizer, scheduler, loader)
        called, self.optimizer, self._schedule, self.training_dataloader = prepared
        self.lr_scheduler = getattr(self._schedule, "scheduler", None)  # itself, as there
        if self.optimizer is not None:
            self.optimizer.__class__ = EngineOptimizer  # a PreparedOptimizer with names more
        object.__setattr__(self, "_called", called)  # not a submodule: its parameters are the module's
        self._counters = Counters(**dict.fromkeys(COUNTED, 0), client={})
        acc.register_for_checkpointing(self._counters)
        self._micro: AbstractContextManager[None] | None = None
        self._in_window = 0  # micro-batches since the last update
        self._norm: Tensor | None = None
        self._boundary = self._applied = self._inside = self._scaled = self._apart = False
        self._low = any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
        self._seconds: dict[str, list[float]] = {}  # by phase, with wall_clock_breakdown
        profiled = config.value("enabled", "flops_profiler")
        self._profile_step = config.value("profile_step", "flops_profiler") if profiled else None

    # -- the step -----------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's outputs, in its own precision; floating-point inputs are cast to it."""
        training = self.training and torch.is_grad_enabled() and self.optimizer is not None
        if not training:
            with self._timed("forward"):
                return self._called(*inputs, **kwargs)
        self._begin()
        flops = self._count_flops() if self._profile_step == self.global_steps else nullcontext()
        with self._timed("forward"), flops, self._unsynced():
            outputs = self._called(*inputs, **kwargs)
        for leaf in leaves(outputs) if self._config.batch.steps > 1 else ():
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self._divide)
        return outputs

    def _divide(self, gradient: Tensor | None) -> Tensor | None:
        """Divide a gradient of the script's own ``loss.backward()``; None is that of an output without use."""
        return gradient if gradient is None or self._inside else gradient / self._config.batch.steps

    @property
    def _late(self) -> bool:
        """Whether `backward` averages gradients at the boundary, and not the strategy while backward runs."""
        # So several backward passes before a step, and parameters without a gradient, are right. Sharded gradients take both
        # anyway, and the Accelerator averages sums of low-precision gradients at the end of a window.
        summed = self._config.batch.steps > 1 and self._low
        return self.accelerator.num_processes > 1 and self._config.stage < 2 and not summed

    def _unsynced(self) -> AbstractContextManager[None]:
        """Gradients stay on this rank until the boundary, up to stage 1."""
        return self.accelerator.no_sync(self._called) if self._late else nullcontext()

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Average gradients over the ranks, once or again; a parameter without one takes part with zeros, as in DeepSpeed."""
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        current_world().average_([p.grad for p in parameters])  # type: ignore[misc]

    def _begin(self) -> None:
        if self._micro is None:
            self._micro = self.accelerator.accumulate(self._called)
            self._micro.__enter__()

    def _end(self) -> None:
        if self._micro is not None:
            self._micro.__exit__(None, None, None)
            self._micro = None

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the loss scale, for ``engine.scale(loss).backward()``."""
        self._scaled = True
        return self.accelerator.scaler.scale(loss) if self.accelerator.scaler.scales else loss

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Gradients of `loss`, divided by the accumulation steps; returns the divided loss."""
        if self.optimizer is None:
            raise EngineError(f"backward() on an engine without an optimizer: {NAME_ONE}")
        self._begin()
        steps = self._config.batch.steps
        loss = loss if scale_wrt_gas else loss * steps
        self._inside = True
        try:
            with self._timed("backward"), self._unsynced():
                self.accelerator.backward(loss, retain_graph=retain_graph)
                if self._late and self.accelerator.sync_gradients and not self._apart:
                    self.allreduce_gradients()
        finally:
            self._inside = False
        self._boundary = True
        return loss.detach() / steps

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; on the last one of an update also clip, and step the optimizer and the scheduler."""
        if self._apart:
            raise EngineError(
                "It is illegal to call Engine.step() inside no_sync context manager: step after the block"
            )
        if not self._boundary:  # after the script's own loss.backward()
            if self._micro is None:
                if all(p.grad is None for p in self.module.parameters()):
                    raise EngineError(
                        "engine.step() before a backward: call engine(…) and backward(loss) first"
                    )
                self._begin()
                self._scaled = True  # gradients that the script set, times the loss scale
            if self.accelerator.scaler.scales and not self._scaled:
                raise StepError("loss.backward() leaves the loss scale out: engine.scale(loss).backward()")
            # A backward that adds nothing hands the gradients to the Accelerator.
            self.backward(torch.zeros((), device=self.device, requires_grad=True))
        self._boundary = self._scaled = False
        acc, counters, config = self.accelerator, self._counters, self._config
        ended = acc.sync_gradients
        with self._timed("step"):
            if ended:
                self._norm = acc.clip_grad_norm_(self._called.parameters(), config.clip or float("inf"))
            self.optimizer.step()
            self.optimizer.zero_grad()
            skipped = ended and acc.optimizer_step_was_skipped
            self._applied = ended and not skipped
            counters.global_steps += ended
            counters.skipped_steps += skipped
            if self._applied and self._schedule is not None:
                self._schedule.step(**(lr_kwargs or {}))
        self._end()
        counters.micro_steps += 1
        counters.global_samples += ended * config.batch.train
        self._in_window = 0 if ended else self._in_window + 1
        every = config.value("steps_per_print")
        if ended and every and counters.global_steps % every == 0:
            told = counters.global_steps, counters.skipped_steps, self.get_lr(), self.get_mom()
            logger.info("step=%d, skipped=%d, lr=%s, mom=%s", *told)
            means = [f"{name}: {1e3 * sum(s) / len(s):.2f}" for name, s in self._seconds.items()]
            if means:
                logger.info("time (ms) | %s", " | ".join(means))
            self._seconds.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients stay on this rank, and no step is made. Stages 2 and 3 reduce at each backward, and refuse it."""
        if self._config.stage >= 2:
            raise EngineError(
                "no_sync context manager is incompatible with stages 2 and 3, which reduce at each backward"
            )
        if self._apart:
            raise EngineError("no_sync context manager reentry is unsupported: leave the inner one out")
        self._apart = True
        try:
            with self.accelerator.no_sync(self._called):
                yield
        finally:
            self._apart = False

    def empty_partition_cache(self) -> None:
        """Does nothing: weights are gathered for a block at a time, and freed behind it."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters."""
        self.module.zero_grad(set_to_none)

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Samples of an update, by the number of micro-batches; a ValueError for no multiple of micro-batch × ranks."""
        batch = self._config.batch
        train_batch_size = index(train_batch_size)
        if train_batch_size % (batch.micro * batch.world) or train_batch_size < 1:
            raise ValueError(f"train_batch_size={train_batch_size} is not {batch.micro} × {batch.world} × n")
        steps = train_batch_size // (batch.micro * batch.world)
        self.accelerator.gradient_accumulation_steps = steps
        self._config = replace(self._config, batch=batch._replace(train=train_batch_size, steps=steps))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Samples of a micro-batch, with as many micro-batches in an update as before."""
        batch = self._config.batch
        if index(micro_batch_size) < 1:
            raise ValueError(f"micro_batch_size={micro_batch_size} is below 1")
        train = micro_batch_size * batch.steps * batch.world
        self._config = replace(self._config, batch=batch._replace(train=train, micro=micro_batch_size))

    def compile(
        self, backend: Any = None, compile_kwargs: Mapping[str, Any] | None = None, **others: Any
    ) -> None:
        """torch.compile of the model, in place."""
        if any(others.values()):
            _refuse("engine.compile", remedy="leave it out", **others)
        self.module.compile(**({"backend": backend} if backend else {}), **(compile_kwargs or {}))

    # -- times and operations ---------------------------------------------------------------------------------------------

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Add the seconds inside to those of `phase`, for `wall_clock_breakdown`."""
        if not self._config.value("wall_clock_breakdown"):
            yield
            return
        begin = self._now()
        yield
        self._seconds.setdefault(phase, []).append(self._now() - begin)

    def _now(self) -> float:
        """Seconds, once the device has done its work."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def _count_flops(self) -> Iterator[None]:
        """Report the operations of the forward inside: matrix products, convolutions, attention."""
        begin, self._profile_step = self._now(), None  # once
        with FlopCounterMode(display=False) as counter:
            yield
        flops, seconds = counter.get_total_flops(), self._now() - begin
        report = (
            f"flops profiler, one forward: {flops:,} floating-point operations, {sum(p.numel() for p in self.module.parameters()):,} "
            f"parameters, {seconds * 1e3:.2f} ms; the counting itself takes time"
        )
        if file := self._config.value("output_file", "flops_profiler"):
            Path(file).write_text(report + "\n", encoding="utf-8")
        else:
            print(report)  # noqa: T201 (as asked for by the configuration)

    # -- attributes ---------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Counters, answers about the configuration, and the attributes of the user's model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in COUNTED:
                return getattr(self._counters, name)
            if name in VALUES:
                return VALUES[name](self)
            if name in METHODS:
                return partial(METHODS[name], self)
            if hasattr(module := self.__dict__.get("_modules", {}).get("module"), name):
                return getattr(module, name)
            if name in ANSWERS:
                section, key = ANSWERS[name]
                return lambda: self._config.value(key, section)
            if name in REFUSED:
                return partial(_refuse, f"engine.{name}", remedy=REFUSED[name])
            if name in ANSWERED_FALSE:
                return lambda: False
            raise

    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer else []

    def deepspeed_io(
        self, dataset: Any, batch_size: int | None = None, collate_fn: Any = None, **others: Any
    ) -> Any:
        """A prepared loader of `dataset`."""
        if others:
            remedy = "make the DataLoader, and pass it to engine.accelerator.prepare"
            _refuse("deepspeed_io", remedy=remedy, **others)
        size = batch_size or self._config.batch.micro
        return self.accelerator.prepare(self._loader(dataset, size, collate_fn or self._collate))

    def _loader(self, data: Any, size: int, collate: Any) -> DataLoader[Any]:
        drop = self._config.value("dataloader_drop_last")
        return DataLoader(data, batch_size=size, shuffle=True, collate_fn=collate, drop_last=drop)

    def module_state_dict(
        self, destination: Any = None, prefix: str = "", keep_vars: bool = False, exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """The module's own."""
        state = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        return self._without_frozen(state) if exclude_frozen_parameters else state

    def load_module_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load ``checkpoint["module"]`` into the module."""
        self.module.load_state_dict(checkpoint["module"], strict=strict)

    def _without_frozen(self, state: dict[str, Any]) -> dict[str, Any]:
        frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        return {name: value for name, value in state.items() if name not in frozen}

    def destroy(self) -> None:
        """Close the run; another engine can be made afterwards."""
        self._end()
        self.accelerator.close()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, save_dir: str | os.PathLike[str], tag: str | None = None, client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True, exclude_frozen_parameters: bool = False,
    ) -> bool:  # fmt: skip
        """Write everything to ``save_dir/tag``, a checkpoint of easymp's, and its name to ``save_dir/latest``; on all ranks.

        `tag` is ``global_step`` and the number of updates by default. `client_state` holds numbers, strings, and lists, tuples and dicts of
        them; `load_checkpoint` returns it. Between two micro-batches of an update no gradients are saved, as in DeepSpeed.
        """
        if exclude_frozen_parameters:
            raise RefusedError("exclude_frozen_parameters=True: only save_16bit_model takes it")
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        checked = self._config.value("tag_validation", "checkpoint").lower()
        if checked != "ignore" and len(tags := dict.fromkeys(current_world().gather_objects(tag))) > 1:
            said = f"the tag of save_checkpoint differs between ranks: {', '.join(tags)}. Pass the same one on all ranks"
            if checked == "fail":
                raise EngineError(said)
            warnings.warn(f"{said}; rank 0's counts", EasympWarning, stacklevel=2)
        self._counters.client = dict(client_state or {})
        window = self.accelerator._window
        before, window.sync = window.sync, True  # the script asks for a save here
        try:
            self.accelerator.save_state(os.path.join(save_dir, tag))  # a Path would break a URL
        finally:
            window.sync = before
        if save_latest and self.global_rank == 0:
            fresh = Path(save_dir, "latest.tmp")
            fresh.write_text(tag, encoding="utf-8")
            fresh.replace(Path(save_dir, "latest"))
        self.accelerator.wait_for_everyone()
        return True

    def load_checkpoint(
        self, load_dir: str | os.PathLike[str], tag: str | None = None, load_module_strict: bool = True,
        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True, load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, Any]:  # fmt: skip
        """The path that was loaded and its `client_state`; or (None, None) with a warning, where there is no ``latest``.

        The next micro-batch begins an update. `load_module_only` leaves optimizer and counters as they are. Without optimizer states,
        `client_state` may hold no tensors. A CheckpointError is raised before anything has changed.
        """
        if custom_load_fn is not None:
            raise RefusedError("custom_load_fn=…: use easymp.load_weights(engine.module, place)")
        latest = Path(load_dir, "latest")
        if tag is None and not latest.is_file():
            said = f"Unable to find latest file at {latest}: pass the folder of save_checkpoint, or a tag"
            warnings.warn(said, EasympWarning, stacklevel=2)
            return None, None
        tag = latest.read_text(encoding="utf-8").strip() if tag is None else str(tag)
        place = os.path.join(load_dir, tag)
        self._drop_window()
        schedule = self._schedule if load_lr_scheduler_states else None
        if load_module_only or not load_optimizer_states:
            return place, self._load_weights(place, load_module_strict, load_module_only, schedule)
        keep = self._schedule is not None and schedule is None
        kept = copy.deepcopy(self._schedule.state_dict()) if keep else None
        self.accelerator.load_state(place, strict=load_module_strict)
        if keep:
            self._schedule.load_state_dict(kept)
        return place, self._counters.client

    def _drop_window(self) -> None:
        """Forget the gradients of an unfinished update."""
        self._end()
        window = self.accelerator._window
        window.micro, window.backwards, window.sync = 0, 0, True
        self._in_window, self._boundary = 0, False
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def _load_weights(self, place: str, strict: bool, module_only: bool, schedule: Any) -> Any:
        """Load weights, and unless `module_only` counters and the schedule; return the client's state."""

        def no_tensors(name: str) -> Any:
            raise RefusedError(f"{name} is a tensor, which is read with the optimizer's states: load all")

        states = open_checkpoint(place).manifest.states
        counters = unpack(states[COUNTERS], no_tensors)
        has_rates = schedule is not None and SCHEDULE in states and not module_only
        rates = unpack(states[SCHEDULE], no_tensors) if has_rates else None
        load_weights(self._called, place, strict=strict)
        if not module_only:
            self._counters.load_state_dict(counters)
        if rates is not None:
            schedule.load_state_dict(rates)
        return counters["client"]

    def save_16bit_model(
        self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False,
    ) -> bool:  # fmt: skip
        """Whole weights in one file, fp16 under fp16, else fp32; on all ranks: of torch.save, unless named ``.safetensors``."""
        state = self.accelerator.get_state_dict(self._called)
        if self.global_rank == 0:
            state = self._without_frozen(state) if exclude_frozen_parameters else state
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            write = self.accelerator.save if save_filename.endswith(".safetensors") else save_whole
            write(state, Path(save_dir, save_filename))
        self.accelerator.wait_for_everyone()
        return True

    save_fp16_model = save_16bit_model


def _accelerator(config: Config) -> Accelerator:
    steps = config.batch.steps
    strategy, options = STRATEGIES[config.stage if read_ranks().size > 1 else 0]
    if config.offload and strategy != "fsdp":
        layer.ignore({"zero_optimization.offload_…": "with stage 3 on several processes only"})
    handlers: list[Any] = [AutocastKwargs(output_dtype=None)]
    if config.half == "fp16":
        handlers.append(GradScalerKwargs(**config.scale()))
    return Accelerator(
        mixed_precision=config.precision,  # type: ignore[arg-type]
        strategy=strategy,  # type: ignore[arg-type]
        strategy_options={"cpu_offload": config.offload} if strategy == "fsdp" else options,
        gradient_accumulation_plugin=GradientAccumulationPlugin(steps, sync_with_dataloader=False),
        kwargs_handlers=handlers,
        nonfinite="skip" if config.skips else None,
    )


def _refuse(call: str, *args: Any, remedy: str, **others: Any) -> None:
    raise RefusedError(f"{call}({', '.join(others)}) is not part of easymp.compat: {remedy}")


def save_whole(state: Any, path: Path) -> None:
    """Write a file of torch.save that is there as a whole or not at all."""
    fresh = path.with_name(f"{path.name}.tmp")
    torch.save(state, fresh)
    fresh.replace(path)
