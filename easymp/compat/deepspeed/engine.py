"""The engine: an Accelerator behind forward, backward and step."""

from __future__ import annotations

import copy
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from ...accelerator import Accelerator
from ...checkpoint.codec import unpack
from ...checkpoint.folders import open_checkpoint
from ...checkpoint.weights import load_weights
from ...distributed import read_ranks
from ...errors import EasympWarning, RefusedError, SettingError, StepError
from ...logging import get_logger
from ...options import AutocastKwargs, GradientAccumulationPlugin, GradScalerKwargs
from ...training.state import current_world
from . import optimizers
from .config import Config, layer

logger = get_logger(__name__)

COUNTERS, SCHEDULE = "state/object_0", "state/scheduler_0"  # in a checkpoint
# Up to stage 2 each rank holds whole parameters, which scripts read and save.
STRATEGIES = {0: "auto", 1: "zero1", 2: "zero1", 3: "fsdp"}
NATIVE = """
acc = Accelerator(mixed_precision={precision!r}, strategy={strategy!r}, gradient_accumulation_steps={steps})
model, optimizer, loader = acc.prepare(model, optimizer, loader)
for inputs, targets in loader:
    with acc.accumulate(model):
        acc.backward(loss_fn(model(inputs), targets))  # engine.backward
        acc.clip_grad_norm_(model.parameters(), {clip})   # gradient_clipping
        optimizer.step()                               # engine.step
        optimizer.zero_grad()
acc.save_state()                                       # engine.save_checkpoint
"""
COUNTED = ("global_steps", "micro_steps", "skipped_steps", "global_samples")
# Methods of the engine that tell its configuration.
ANSWERS: dict[str, Callable[[Config], Any]] = {
    "train_batch_size": lambda config: config.batch.train,
    "train_micro_batch_size_per_gpu": lambda config: config.batch.micro,
    "gradient_accumulation_steps": lambda config: config.batch.steps,
    "get_batch_info": lambda config: (config.batch.train, config.batch.micro, config.batch.steps),
    "gradient_clipping": lambda config: config.clip,
    "fp16_enabled": lambda config: config.half == "fp16",
    "bfloat16_enabled": lambda config: config.half == "bf16",
    "dynamic_loss_scale": lambda config: config.half == "fp16" and config.scale.get("dynamic", True),
    "zero_optimization": lambda config: config.stage > 0,
    "zero_optimization_stage": lambda config: config.stage,
    "wall_clock_breakdown": lambda config: config.breakdown,
    "steps_per_print": lambda config: config.every,
}


class Counters:
    """The engine's counters and the caller's own state; in every checkpoint."""

    def __init__(self) -> None:
        self.global_steps = self.micro_steps = self.skipped_steps = self.global_samples = 0
        self.client: Any = {}

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class DeepSpeedEngine(nn.Module):
    """The engine that `initialize` returns; call it as the model.

    Attributes:
        module: the user's model.
        optimizer, lr_scheduler, training_dataloader: prepared, or None.
        accelerator: the Accelerator that does the work.
        global_steps, micro_steps, skipped_steps, global_samples: updates, backward passes, updates that an overflow skipped, samples.

    `ANSWERS` has its methods that tell the configuration.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        optimizer: Any = None,
        parameters: Any = None,
        data: Any = None,
        scheduler: Any = None,
        collate: Any = None,
    ) -> None:
        super().__init__()
        self.module = model
        self.config = config
        layer.ignore(config.ignored)
        self.accelerator = acc = _accelerator(config)
        how = {"precision": config.precision, "strategy": acc.plan.strategy.value}
        layer.use(
            "initialize, engine.backward and engine.step",
            NATIVE.format(**how, steps=config.batch.steps, clip=config.clip or None),
        )
        given = parameters if parameters is not None else model.parameters()
        if optimizer is None and config.optimizer is not None:
            optimizer = optimizers.optimizer(*config.optimizer, given)
        elif optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = optimizer(given)
        if scheduler is None and config.scheduler is not None:
            scheduler = optimizers.scheduler(*config.scheduler)
        if scheduler is not None and not hasattr(scheduler, "step"):
            if optimizer is None:
                raise SettingError(f"a scheduler without an optimizer: {NAME_ONE}")
            scheduler = scheduler(optimizer)
        loader = None if data is None else self._loader(data, config.batch.micro, collate)
        prepared = acc.prepare(model, optimizer, scheduler, loader)
        called, self.optimizer, self.lr_scheduler, self.training_dataloader = prepared
        object.__setattr__(self, "_called", called)  # not a submodule: its parameters are the module's
        self._counters = Counters()
        acc.register_for_checkpointing(self._counters)
        self._micro: AbstractContextManager[None] | None = None
        self._norm: Tensor | None = None
        self._boundary = self._applied = False
        # As in DeepSpeed, several backward passes before a step, and parameters without a gradient, are right up to stage 2: `backward`
        # averages gradients at the boundary, not DDP's hooks. The Accelerator averages sums of low-precision ones at the end of a window.
        summed = config.batch.steps > 1 and any(
            p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters()
        )
        self._late = acc.num_processes > 1 and config.stage < 3 and not summed
        self._seconds: dict[str, list[float]] = {}  # by phase, with wall_clock_breakdown
        self._profile_step = _profile_step(config.flops)

    # -- the step -----------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's outputs, in its own precision; floating-point inputs are cast to it."""
        training = self.training and torch.is_grad_enabled() and self.optimizer is not None
        if training:
            self._begin()
        profiled = training and self.global_steps == self._profile_step
        with self._timed("forward"), self._count_flops() if profiled else nullcontext():
            with self._unsynced() if training else nullcontext():
                return self._called(*inputs, **kwargs)

    def _unsynced(self) -> AbstractContextManager[None]:
        """Gradients stay on this rank until the boundary, up to stage 2."""
        return self.accelerator.no_sync(self._called) if self._late else nullcontext()

    def _average_gradients(self) -> None:
        """Average gradients over the ranks; a parameter without one takes part with zeros, as in DeepSpeed.

        After a further backward the average of an average is that average, so only new gradients are averaged.
        """
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

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **others: Any
    ) -> Tensor:
        """Gradients of `loss`, divided by the accumulation steps; returns the divided loss.

        Raises:
            StepError: a loss that is not a scalar, or has no graph; or no optimizer.
        """
        _refuse("engine.backward", others, "leave it out")
        if self.optimizer is None:
            raise StepError(f"backward() on an engine without an optimizer: {NAME_ONE}")
        self._begin()
        steps = self.config.batch.steps
        if not scale_wrt_gas:
            loss = loss * steps
        with self._timed("backward"), self._unsynced():
            self.accelerator.backward(loss, retain_graph=retain_graph)
            if self._late and self.accelerator.sync_gradients:
                self._average_gradients()
        self._boundary = True
        return loss.detach() / steps

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch ends its update."""
        return (self._counters.micro_steps + 1) % self.config.batch.steps == 0

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; on the last one of an update also clip, and step the optimizer and the scheduler.

        Raises:
            StepError: no backward since the last step.
        """
        if not self._boundary:
            raise StepError(
                "engine.step() before engine.backward(): call backward(loss) once for each step()"
            )
        self._boundary = False
        acc, counters, config = self.accelerator, self._counters, self.config
        ended = acc.sync_gradients
        with self._timed("step"):
            if ended:
                self._norm = acc.clip_grad_norm_(self._called.parameters(), config.clip or float("inf"))
            self.optimizer.step()
            self.optimizer.zero_grad()
            skipped = ended and config.half == "fp16" and acc.optimizer_step_was_skipped
            self._applied = ended and not skipped
            counters.global_steps += ended
            counters.skipped_steps += skipped
            if self._applied and self.lr_scheduler is not None:
                self.lr_scheduler.step(**(lr_kwargs or {}))
        self._end()
        counters.micro_steps += 1
        counters.global_samples += config.batch.micro * config.batch.world
        if ended and config.every and counters.global_steps % config.every == 0:
            logger.info(
                "step=%d, skipped=%d, lr=%s", counters.global_steps, counters.skipped_steps, self.get_lr()
            )
            self._log_times()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients stay on this rank."""
        with self.accelerator.no_sync(self._called):
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters."""
        self.module.zero_grad(set_to_none)

    # -- times and operations ---------------------------------------------------------------------------------------------

    def _now(self) -> float:
        """Seconds, once the device has done its work."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        if not self.config.breakdown:
            yield
            return
        begin = self._now()
        yield
        self._seconds.setdefault(phase, []).append(self._now() - begin)

    def _log_times(self) -> None:
        """Log the means of the phases since the last call."""
        means = [f"{name}: {1e3 * sum(s) / len(s):.2f}" for name, s in self._seconds.items()]
        if means:
            logger.info("time (ms) | %s", " | ".join(means))
        self._seconds.clear()

    @contextmanager
    def _count_flops(self) -> Iterator[None]:
        """Report the operations of the forward inside, by torch's FlopCounterMode: matrix products, convolutions, attention."""
        self._profile_step = None  # once
        begin, counter = self._now(), FlopCounterMode(display=False)
        with counter:
            yield
        seconds = self._now() - begin
        flops, parameters = counter.get_total_flops(), sum(p.numel() for p in self.module.parameters())
        report = (
            f"flops profiler, one forward: {flops:,} floating-point operations, {parameters:,} parameters, {seconds * 1e3:.2f} ms, "
            f"{flops / max(seconds, 1e-9):.3g} operations a second; the counting itself takes time"
        )
        file = (self.config.flops or {}).get("output_file")
        if file:
            Path(file).write_text(report + "\n", encoding="utf-8")
        else:
            print(report)  # noqa: T201 (as asked for by the configuration)

    # -- attributes ---------------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Counters, `ANSWERS`, and the attributes of the user's model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in COUNTED:
                return getattr(self._counters, name)
            if name in ANSWERS:
                return partial(ANSWERS[name], self.config)
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            raise

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def local_rank(self) -> int:
        return self.accelerator.local_process_index

    @property
    def global_rank(self) -> int:
        return self.accelerator.process_index

    @property
    def world_size(self) -> int:
        return self.accelerator.num_processes

    dp_world_size = world_size

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next backward; 1.0 unless fp16."""
        return self.accelerator.scaler.get_scale()

    def get_lr(self) -> list[float]:
        """The rate of each param group."""
        return [float(group["lr"]) for group in (self.optimizer.param_groups if self.optimizer else ())]

    def get_mom(self) -> list[Any]:
        """Momentum, or betas, of each param group."""
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """2-norm of the gradients at the last update, before clipping; None before the first."""
        return None if self._norm is None else float(self._norm)

    def was_step_applied(self) -> bool:
        """Whether the last `step` ended an update that no overflow skipped."""
        return self._applied

    def deepspeed_io(
        self, dataset: Any, batch_size: int | None = None, collate_fn: Any = None, **others: Any
    ) -> Any:
        """A prepared loader of `dataset`."""
        _refuse("deepspeed_io", others, "make the DataLoader, and pass it to engine.accelerator.prepare")
        return self.accelerator.prepare(
            self._loader(dataset, batch_size or self.config.batch.micro, collate_fn)
        )

    def _loader(self, data: Any, size: int, collate: Any) -> DataLoader[Any]:
        return DataLoader(
            data, batch_size=size, shuffle=True, collate_fn=collate, drop_last=self.config.drop_last
        )

    def module_state_dict(self) -> dict[str, Any]:
        """The module's own."""
        return self.module.state_dict()

    def destroy(self) -> None:
        """Close the run; another engine can be made afterwards."""
        self._end()
        self.accelerator.close()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write everything to ``save_dir/tag``, a checkpoint of easymp's, and its name to ``save_dir/latest``; on all ranks.

        Args:
            tag: ``global_step`` and the number of updates by default.
            client_state: numbers, strings, and lists, tuples and dicts of them; `load_checkpoint` returns it.

        Raises:
            CheckpointError: it cannot be written; earlier checkpoints are untouched.
        """
        if exclude_frozen_parameters:
            raise RefusedError(
                "exclude_frozen_parameters=True is not honoured: a checkpoint is whole. Leave it out"
            )
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        self._counters.client = dict(client_state or {})
        self.accelerator.save_state(os.path.join(save_dir, tag))  # a Path would break a URL
        if save_latest and self.global_rank == 0:
            _write_whole(Path(save_dir, "latest"), tag)
        self.accelerator.wait_for_everyone()
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, Any]:
        """The path that was loaded and its `client_state`; or (None, None) with a warning, where there is no ``latest``.

        Without optimizer states, `client_state` may hold no tensors.

        Args:
            load_module_only: weights alone, with the optimizer and the counters as they are.
            load_optimizer_states: False: the weights, the counters, and the schedule unless `load_lr_scheduler_states` is False, too.

        Raises:
            CheckpointError: it does not fit or cannot be read; nothing has changed.
            RefusedError: `custom_load_fn`.
        """
        if custom_load_fn is not None:
            raise RefusedError(
                "custom_load_fn=… is not honoured: load with easymp.load_weights(engine.module, place)"
            )
        latest = Path(load_dir, "latest")
        if tag is None and not latest.is_file():
            warnings.warn(
                f"Unable to find latest file at {latest}, if trying to load latest checkpoint "
                "please ensure this file exists or pass an explicit checkpoint tag when loading a checkpoint.",
                EasympWarning,
                stacklevel=2,
            )
            return None, None
        tag = latest.read_text(encoding="utf-8").strip() if tag is None else str(tag)
        place = os.path.join(load_dir, tag)
        schedule = self.lr_scheduler if load_lr_scheduler_states else None
        if load_module_only or not load_optimizer_states:
            return place, self._load_weights(place, load_module_strict, load_module_only, schedule)
        keep = self.lr_scheduler is not None and schedule is None
        kept = copy.deepcopy(self.lr_scheduler.state_dict()) if keep else None
        self.accelerator.load_state(place, strict=load_module_strict)
        if keep:
            self.lr_scheduler.load_state_dict(kept)
        return place, self._counters.client

    def _load_weights(self, place: str, strict: bool, module_only: bool, schedule: Any) -> Any:
        """Load weights, and unless `module_only` counters and the schedule; return the client's state."""
        states = open_checkpoint(place).manifest.states
        counters = unpack(states[COUNTERS], _no_tensors)
        has_rates = schedule is not None and SCHEDULE in states
        rates = unpack(states[SCHEDULE], _no_tensors) if has_rates else None
        load_weights(self._called, place, strict=strict)
        if not module_only:
            self._counters.load_state_dict(counters)
            if rates is not None:
                schedule.load_state_dict(rates)
        return counters["client"]

    def save_16bit_model(
        self, save_dir: str | os.PathLike[str], save_filename: str = "model.safetensors", **others: Any
    ) -> bool:
        """Whole weights for Hugging Face's tools, in their own precision: fp16 under fp16, else fp32."""
        if save_filename not in ("model.safetensors", "pytorch_model.bin") or others:
            raise RefusedError(
                f"save_16bit_model writes model.safetensors, not {save_filename!r}: leave the name out"
            )
        self.accelerator.save_model(self._called, save_dir)
        return True

    save_fp16_model = save_16bit_model


NAME_ONE = "name one in the configuration, or pass it to initialize()"


def _accelerator(config: Config) -> Accelerator:
    several = read_ranks().size > 1
    sharded = several and config.stage == 3
    if config.offload and not sharded:
        layer.ignore({"zero_optimization.offload_…": "with stage 3 on several processes only"})
    if several and config.stage == 2:
        why = "runs as stage 1: gradients are whole on each rank; stage 3 shards them, and parameters"
        layer.ignore({"zero_optimization.stage=2": why})
    handlers: list[Any] = [AutocastKwargs(output_dtype=None)]
    if config.half == "fp16":
        handlers.append(GradScalerKwargs(**config.scale))
    return Accelerator(
        mixed_precision=config.precision,
        strategy=STRATEGIES[config.stage] if several else "auto",
        strategy_options={"cpu_offload": config.offload} if sharded else None,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            config.batch.steps, sync_with_dataloader=False
        ),
        kwargs_handlers=handlers,
    )


def _profile_step(flops: Mapping[str, Any] | None) -> int | None:
    """The update whose first forward is counted."""
    if flops is None:
        return None
    step = flops.get("profile_step", 1)
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise SettingError(f"flops_profiler.profile_step={step!r} is not the number of an update")
    return step


def _refuse(call: str, others: Mapping[str, Any], remedy: str) -> None:
    if others:
        raise RefusedError(f"{call}({', '.join(others)}=…) is not honoured: {remedy}")


def _no_tensors(name: str) -> Any:
    raise RefusedError(
        f"{name} is a tensor: without the optimizer's states no tensors of client_state are read. Load all"
    )


def _write_whole(path: Path, text: str) -> None:
    """Write a file that is there as a whole or not at all."""
    fresh = path.with_name(f"{path.name}.tmp")
    with fresh.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
