"""Words of earlier versions and of Accelerate that easymp lacks, and what to write in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, NoReturn, TypeVar

from ..errors import ArgumentError, nearest

Function = TypeVar("Function", bound=Callable[..., Any])
LOADER_OPTIONS = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler")
# Keywords of the constructor.
SETTING_REMEDIES = {
    name: f"pass settings=Settings({name}=...)"
    for name in (
        *("activation_offload", "convert_sync_batchnorm", "debug", "device_placement", "fused", "gc", "hang_after"),
        *("initialize", "memory", "optimizer_in_backward", "replay", "replica_check", "stochastic_rounding", "timeout"),
    )
}
OTHER_ARGUMENTS = {
    **SETTING_REMEDIES,
    **{name: f"pass dataloader_config=DataLoaderConfiguration({name}=...)" for name in LOADER_OPTIONS},
    "step_scheduler_with_optimizer": "prepared schedulers step once an update; easymp.compat.accelerate has this word",
    "scheduler_steps_per_process": "leave it out: prepared schedulers step once an update, and those of "
    "easymp.compat.accelerate once for each process, as Accelerate's do",
    **dict.fromkeys(
        ("deepspeed_plugin", "deepspeed_plugins"),
        "pass strategy='zero1' (ZeRO-1) or 'fsdp' (ZeRO-2 and 3), and strategy_options",
    ),
    "kwargs_handlers": "pass strategy_options=DistributedDataParallelKwargs(...), Settings(autocast_options=..., "
    "scaler_options=..., timeout=...) as settings, and a ProfileKwargs to profile()",
    "gradient_accumulation_plugin": "pass it as gradient_accumulation_steps",
    "project_config": "pass it as project_dir",
    "dynamo_backend": "pass compile=CompileOptions(backend=...)",
    "dynamo_plugin": "pass compile=CompileOptions(...)",
    "rng_types": "leave it out: data order is f(seed, epoch) on every rank, so there is nothing to synchronise",
    "fsdp_plugin": "pass strategy='fsdp' and strategy_options=FSDPOptions(...)",
    "torch_tp_plugin": "pass strategy='tensor_parallel' and strategy_options=TensorParallelOptions(...)",
    "megatron_lm_plugin": "pass strategy='tensor_parallel' or 'pipeline', and strategy_options",
    "parallelism_config": "pass strategy='hsdp' or 'tensor_parallel', and strategy_options",
}

# Attributes and methods.
BY_LAYER = "easymp.compat.accelerate.Accelerator has it"
OTHER_ATTRIBUTES = {
    "guard": "pass parts=[easymp.SpikeGuard(...)] to Accelerator, which judges each update by itself",
    "hardware": "use plan.hardware",
    "trackers": "use get_tracker(name)",
    "clear": "use free_memory()",
    "get_state_dict": "use dict(accelerator.weights(model)), which gives every rank all tensors",
    **dict.fromkeys(
        ("prepare_model", "prepare_optimizer", "prepare_scheduler", "prepare_data_loader"),
        "use prepare(), for any object",
    ),
    **dict.fromkeys(
        ("register_save_state_pre_hook", "register_load_state_pre_hook"),
        f"use register_for_checkpointing() or a Part with state() and load(); {BY_LAYER}",
    ),
    **dict.fromkeys(
        ("on_local_main_process", "on_last_process", "on_process", "on_local_process", "is_last_process"),
        "compare process_index or local_process_index",
    ),
    "use_distributed": f"use num_processes > 1; {BY_LAYER}",
    "distributed_type": f"use device and plan.strategy; {BY_LAYER}",
    "project_configuration": f"keep the ProjectConfiguration that you pass as project_dir; {BY_LAYER}",
    "logging_dir": f"keep the ProjectConfiguration that you pass as project_dir; {BY_LAYER}",
    "save_iteration": BY_LAYER,
    "state": f"use the Accelerator itself; {BY_LAYER}",
    "gradient_state": f"use sync_gradients and the prepared loader's `last`; {BY_LAYER}",
    "trigger_sync_in_backward": "call the model outside of no_sync() in the micro-step whose gradients are averaged",
    **dict.fromkeys(
        (*LOADER_OPTIONS, "non_blocking", "use_stateful_dataloader"),
        "keep the DataLoaderConfiguration that you pass as dataloader_config",
    ),
}


def refuse_argument(name: str, arguments: Iterable[str]) -> NoReturn:
    """Raise an ArgumentError for a keyword that Accelerator() does not take."""
    remedy = OTHER_ARGUMENTS.get(name)
    hint = nearest(name, arguments) if remedy is None else f": {remedy}"
    raise ArgumentError(f"Accelerator() has no argument {name!r}{hint}")


def without(**remedies: str) -> Callable[[Function], Function]:
    """Decorate a function that has lost these keywords: a call with one is an ArgumentError that says what to do."""

    def decorate(function: Function) -> Function:
        @wraps(function)
        def checked(*args: Any, **keywords: Any) -> Any:
            for name in keywords.keys() & remedies.keys():
                raise ArgumentError(f"{function.__name__}() has no argument {name!r}: {remedies[name]}")
            return function(*args, **keywords)

        return checked  # type: ignore[return-value]

    return decorate
