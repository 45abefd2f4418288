"""The Accelerator with the arguments, their order and the defaults of Accelerate.

Defaults that change the training are Accelerate's: fp32, schedulers that step once a process (scripts count their horizon so), and no
logs without `log_with`. Settings of the environment and of easymp.toml go before them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from ... import accelerator
from ...base.pytree import leaves
from ...checkpoint.api import Path
from ...checkpoint.load import Loaded
from ...distributed import read_ranks
from ...distributed.processes import DistributedType
from ...errors import BatchError, RefusedError, SettingError
from ...optim import PreparedScheduler
from ...options import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    LoggerType,
    ProjectConfiguration,
)
from ...settings import as_record, read_record, resolve
from ...training.collectives import gather_object
from ..layer import unless_set
from .plugins import FullyShardedDataParallelPlugin, TorchDynamoPlugin, layer

NATIVE = """
acc = Accelerator(mixed_precision={precision!r}, gradient_accumulation_steps={steps}, scheduler_steps_per_process=True, log_with={log!r})
"""


class AcceleratedScheduler(PreparedScheduler):
    """Scheduler by Accelerate's rule: a call on a synchronizing micro-step steps once a process, unless the update was skipped.

    easymp's own rule counts optimizer updates. This one counts calls, also before the first update and after several ones.
    """

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the schedule; the step past `total_steps` of a schedule that has them is left out."""
        if not self._with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        self.each_update = max(self.behind, default=0) == 1 and not args and not kwargs
        self.behind = [0] * len(self.optimizers)
        if not self.optimizers[0].synchronizes or any(
            optimizer.step_was_skipped for optimizer in self.optimizers
        ):
            return
        for _ in range(self._steps):
            if not self._at_horizon():
                self.scheduler.step(*args, **kwargs)


class Accelerator(accelerator.Accelerator):
    """`easymp.Accelerator` for scripts of Accelerate; see there. `others` are easymp's further arguments.

    Raises:
        SettingError: a wrong name or value.
        RefusedError: something that was asked for cannot run here, or has another place.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: Any = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[Any] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        **others: Any,
    ) -> None:
        asked = resolve(dataloader_config=dataloader_config)
        read = partial(as_record, DataLoaderConfiguration, "dataloader_config")
        loading = read_record(asked, "dataloader_config", read)
        if split_batches is not None:
            loading = dataclasses.replace(loading, split_batches=split_batches)
        if rng_types is not None:
            layer.ignore({"rng_types": "the order of data is the same on all ranks by itself"})
        if dynamo_plugin is not None:
            if dynamo_backend is not None:
                raise SettingError(
                    "both dynamo_plugin and dynamo_backend ask for torch.compile: pass one of them"
                )
            others["compile"] = dynamo_plugin.compiling()
        if fsdp_plugin is not None and read_ranks().size > 1:
            others["strategy"] = fsdp_plugin.strategy
            others["strategy_options"] = fsdp_plugin.options
            others["activation_checkpointing"] = fsdp_plugin.activation_checkpointing
            self._fsdp_plugin = fsdp_plugin
            if fsdp_plugin.options is not None:
                given = list(kwargs_handlers or ())
                kwargs_handlers = [it for it in given if not isinstance(it, DistributedDataParallelKwargs)]
                if len(kwargs_handlers) < len(given):
                    layer.ignore(
                        {"DistributedDataParallelKwargs": f"strategy {fsdp_plugin.strategy} has no DDP"}
                    )
        others.setdefault("scheduler_steps_per_process", not loading.split_batches)
        super().__init__(
            device_placement=device_placement,
            mixed_precision=unless_set(asked, "mixed_precision", mixed_precision, "no"),
            gradient_accumulation_steps=gradient_accumulation_steps,
            cpu=cpu,
            dataloader_config=loading,
            deepspeed_plugin=deepspeed_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            log_with=unless_set(asked, "log_with", log_with, "none"),
            project_dir=project_dir,
            project_config=project_config,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            kwargs_handlers=kwargs_handlers or (),
            dynamo_backend=dynamo_backend,
            **others,
        )
        self._window.full_passes = True
        how = {
            "precision": self.mixed_precision,
            "steps": self._window.accumulation,
            "log": log_with or "none",
        }
        layer.use("Accelerator()", NATIVE.format(**how))

    _make_scheduler = AcceleratedScheduler

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The user's own module; it carries no wrapper for fp32 outputs, so there is none to keep or take off."""
        return super().unwrap_model(model, keep_torch_compile=keep_torch_compile)

    def init_trackers(
        self, project_name: str, config: Any = None, init_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """As `easymp.Accelerator.init_trackers`; options of trackers that this run does not have wait for one that has."""
        super().init_trackers(project_name, config, self._for_this_run(init_kwargs))

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """As `easymp.Accelerator.log`; options of trackers that this run does not have wait for one that has."""
        super().log(values, step, self._for_this_run(log_kwargs))

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
        """As `easymp.Accelerator.save_state`, with Accelerate's second argument."""
        return super().save_state(output_dir=output_dir, safe_serialization=safe_serialization, **options)

    def load_state(self, input_dir: Path | None = None, load_kwargs: Any = None, **options: Any) -> Loaded:
        """As `easymp.Accelerator.load_state`, with Accelerate's second argument, of which only None is taken."""
        if load_kwargs is not None:
            raise RefusedError(
                f"load_state(load_kwargs={load_kwargs!r}) is not honoured: files are read in one way. Leave it out"
            )
        return super().load_state(input_dir=input_dir, **options)

    def _for_this_run(self, options: Mapping[str, Any] | None) -> dict[str, Any]:
        known = {word.value for word in LoggerType} - set(self._tracking.names)
        return {name: given for name, given in (options or {}).items() if str(name).lower() not in known}

    @property
    def scaler(self) -> Any:
        """The loss scaler under fp16, else None."""
        return super().scaler if self._scaler.scales else None

    @property
    def _models(self) -> list[nn.Module]:
        """The prepared models; libraries ask whether there are any."""
        return self._views()

    @property
    def multi_device(self) -> bool:
        return self.use_distributed

    @property
    def is_fsdp2(self) -> bool:
        return self.distributed_type == DistributedType.FSDP

    @property
    def parallelism_config(self) -> None:
        """None: strategy and strategy_options say how models are split."""
        return None

    @property
    def deepspeed_plugin(self) -> None:
        """None: no run here is DeepSpeed's."""
        return None

    @property
    def fp8_backend(self) -> None:
        """None: fp8 is torch's own."""
        return None
