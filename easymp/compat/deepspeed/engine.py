"""The engine: an Accelerator behind forward, backward and step."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

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
from .config import Config
from .layer import NATIVE, layer
from .timing import Flops, Watches

logger = get_logger(__name__)

LATEST = "latest"
COUNTERS, SCHEDULE = "state/object_0", "state/scheduler_0"  # in a checkpoint
# Up to stage 2 each rank holds whole parameters, which scripts read and save.
STRATEGIES = {0: "auto", 1: "zero1", 2: "zero1", 3: "fsdp"}


COUNTED = ("global_steps", "micro_steps", "skipped_steps", "global_samples")
# Methods of the engine that tell its configuration.
ANSWERS: dict[str, Callable[[Config], Any]] = {
    "train_batch_size": lambda config: config.batch.train,
    "train_micro_batch_size_per_gpu": lambda config: config.batch.micro,
    "gradient_accumulation_steps": lambda config: config.batch.steps,
    "get_batch_info": lambda config: (config.batch.train, config.batch.micro, config.batch.steps),
    "gradient_clipping": lambda config: config.clip,
    "fp16_enabled": lambda config: config.half.scaled,
    "bfloat16_enabled": lambda config: config.half.low and not config.half.scaled,
    "dynamic_loss_scale": lambda config: bool(config.half.scaled and config.scale.get("dynamic", True)),
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
        layer.use(
            "initialize, engine.backward and engine.step",
            NATIVE.format(
                precision=config.half.precision,
                strategy=acc.plan.strategy.value,
                steps=config.batch.steps,
                clip=config.clip or None,
            ),
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
                raise SettingError(
                    "a scheduler without an optimizer: name one in the configuration, or pass it to initialize()"
                )
            scheduler = scheduler(optimizer)
        loader = None if data is None else self._loader(data, config.batch.micro, collate)
        called, self.optimizer, self.lr_scheduler, self.training_dataloader = acc.prepare(
            model, optimizer, scheduler, loader
        )
        object.__setattr__(self, "_called", called)  # no submodule: its parameters are the module's
        self._counters = Counters()
        acc.register_for_checkpointing(self._counters)
        self._micro: AbstractContextManager[None] | None = None
        self._norm: Tensor | None = None
        self._boundary = False
        self._applied = False
        # As in DeepSpeed, several backward passes before a step, and parameters without a gradient, are right up to stage 2: `backward`
        # averages gradients at the boundary, not DDP's hooks. The Accelerator averages sums of low-precision ones at the end of a window.
        summed = config.batch.steps > 1 and any(
            p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters()
        )
        self._late = acc.num_processes > 1 and config.stage < 3 and not summed
        self._watches = Watches(config.breakdown, acc.device)
        self._flops = Flops(config.flops, acc.device) if config.flops is not None else None

    # -- the step -----------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's outputs, in its own precision; floating-point inputs are cast to it."""
        training = self.training and torch.is_grad_enabled() and self.optimizer is not None
        if training:
            self._begin()
        with self._watches("forward"):
            if training and self._flops is not None and self.global_steps == self._flops.step:
                with self._flops.counting(self.module, self._counters.global_samples), self._apart():
                    return self._called(*inputs, **kwargs)
            with self._apart() if training else nullcontext():
                return self._called(*inputs, **kwargs)

    def _apart(self) -> AbstractContextManager[None]:
        """Gradients stay on this rank until the boundary, up to stage 2."""
        return self.accelerator.no_sync(self._called) if self._late else nullcontext()

    def _share(self) -> None:
        """Average gradients over the ranks; a parameter without one takes part with zeros, as in DeepSpeed.

        After a further backward the average of an average is that average, so only what was added is averaged anew.
        """
        gradients = []
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        current_world().average_(gradients)

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
            StepError: a loss that is no scalar, or has no graph; or no optimizer.
        """
        if others:
            raise RefusedError(f"engine.backward({', '.join(others)}=…) is not honoured: leave it out")
        if self.optimizer is None:
            raise StepError(
                "backward() on an engine without an optimizer: name one in the configuration, or pass it to initialize()"
            )
        self._begin()
        steps = self.config.batch.steps
        if not scale_wrt_gas:
            loss = loss * steps
        with self._watches("backward"), self._apart():
            self.accelerator.backward(loss, retain_graph=retain_graph)
            if self._late and self.accelerator.sync_gradients:
                self._share()
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
        acc, counters = self.accelerator, self._counters
        with self._watches("step"):
            if acc.sync_gradients:
                self._norm = acc.clip_grad_norm_(self._called.parameters(), self.config.clip or float("inf"))
                self.optimizer.step()
                self.optimizer.zero_grad()
                counters.global_steps += 1
                self._applied = not (self.config.half.scaled and acc.optimizer_step_was_skipped)
                if not self._applied:
                    counters.skipped_steps += 1
                elif self.lr_scheduler is not None:
                    self.lr_scheduler.step(**(lr_kwargs or {}))
            else:
                self._applied = False
                self.optimizer.step()  # which waits for the end of the window
                self.optimizer.zero_grad()
        ended = acc.sync_gradients
        self._end()
        counters.micro_steps += 1
        counters.global_samples += self.config.batch.micro * self.config.batch.world
        if ended and self.config.every and counters.global_steps % self.config.every == 0:
            logger.info(
                "step=%d, skipped=%d, lr=%s", counters.global_steps, counters.skipped_steps, self.get_lr()
            )
            self._watches.tell(logger.info)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients stay on this rank."""
        with self.accelerator.no_sync(self._called):
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters."""
        self.module.zero_grad(set_to_none)

    # -- what it is ---------------------------------------------------------------------------------------------------

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
        """Whether the last `step` ended an update, and no overflow skipped it."""
        return self._applied

    def deepspeed_io(
        self, dataset: Any, batch_size: int | None = None, collate_fn: Any = None, **others: Any
    ) -> Any:
        """A prepared loader of `dataset`."""
        if others:
            raise RefusedError(
                f"deepspeed_io({', '.join(others)}=…) is not honoured: make the DataLoader, and pass it to engine.accelerator.prepare"
            )
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
            client_state: numbers, words, and lists, tuples and dicts of them; comes back from `load_checkpoint`.

        Raises:
            CheckpointError: it cannot be written; what was there is untouched.
        """
        if exclude_frozen_parameters:
            raise RefusedError(
                "exclude_frozen_parameters=True cannot be honoured: a checkpoint is whole, or is none. Leave it out"
            )
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        self._counters.client = dict(client_state or {})
        self.accelerator.save_state(os.path.join(os.fspath(save_dir), tag))
        if save_latest and self.global_rank == 0:
            _write(os.path.join(os.fspath(save_dir), LATEST), tag)
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
        if tag is None:
            tag = _read(os.path.join(os.fspath(load_dir), LATEST))
            if tag is None:
                warnings.warn(
                    f"Unable to find latest file at {os.path.join(os.fspath(load_dir), LATEST)}, if trying to load latest checkpoint "
                    "please ensure this file exists or pass an explicit checkpoint tag when loading a checkpoint.",
                    EasympWarning,
                    stacklevel=2,
                )
                return None, None
        place = os.path.join(os.fspath(load_dir), str(tag))
        schedule = self.lr_scheduler if load_lr_scheduler_states else None
        if load_module_only or not load_optimizer_states:
            states = open_checkpoint(place).manifest.states
            counters = unpack(states[COUNTERS], _no_tensors)
            has_rates = schedule is not None and SCHEDULE in states
            rates = unpack(states[SCHEDULE], _no_tensors) if has_rates else None
            load_weights(self._called, place, strict=load_module_strict)
            if not load_module_only:
                self._counters.load_state_dict(counters)
                if schedule is not None and rates is not None:
                    schedule.load_state_dict(rates)
            return place, counters["client"]
        keep = self.lr_scheduler is not None and schedule is None
        kept = copy.deepcopy(self.lr_scheduler.state_dict()) if keep else None
        self.accelerator.load_state(place, strict=load_module_strict)
        if keep:
            self.lr_scheduler.load_state_dict(kept)
        return place, self._counters.client

    def save_16bit_model(
        self, save_dir: str | os.PathLike[str], save_filename: str = "model.safetensors", **others: Any
    ) -> bool:
        """Whole weights as Hugging Face's tools read them, in the precision that they have: fp16 under fp16, and else fp32."""
        if save_filename not in ("model.safetensors", "pytorch_model.bin") or others:
            raise RefusedError(
                f"save_16bit_model writes model.safetensors, not {save_filename!r}: leave the name out"
            )
        self.accelerator.save_model(self._called, save_dir)
        return True

    save_fp16_model = save_16bit_model


def _accelerator(config: Config) -> Accelerator:
    ranks = read_ranks()
    strategy = STRATEGIES[config.stage] if ranks.size > 1 else "auto"  # one process has nobody to share with
    options: dict[str, Any] = {}
    if config.stage == 3 and ranks.size > 1:
        options = {"cpu_offload": config.offload}
    elif config.offload:
        layer.ignore({"zero_optimization.offload_…": "with stage 3 on several processes only"})
    if config.stage == 2 and ranks.size > 1:
        layer.ignore(
            {
                "zero_optimization.stage=2": "runs as stage 1: gradients are whole on each rank; stage 3 shards them, and parameters"
            }
        )
    handlers: list[Any] = [AutocastKwargs(output_dtype=None)]
    if config.half.scaled:
        handlers.append(GradScalerKwargs(**config.scale))
    return Accelerator(
        mixed_precision=config.half.precision,
        strategy=strategy,
        strategy_options=options or None,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            config.batch.steps, sync_with_dataloader=False
        ),
        kwargs_handlers=handlers,
    )


def _no_tensors(name: str) -> Any:
    raise RefusedError(
        f"{name} is a tensor: without the optimizer's states no tensors of client_state are read. Load all"
    )


def _write(path: str, tag: str) -> None:
    fresh = f"{path}.tmp"
    with open(fresh, "w", encoding="utf-8") as file:
        file.write(tag)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return None
