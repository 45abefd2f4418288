"""A configuration of DeepSpeed, key by key, and what each key is here.

Half of it is about the script, which makes its own optimizer, scheduler and loader: for these the line to write is said.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from ... import optim
from ...errors import SettingError, nearest
from .taking import CLIP, OFF, Rule, Rules, Taking, spelled, when_on

AUTO = "nothing to take: auto, so the script says it"
DISK = "no counterpart: nothing is moved to disks"
COMM = "no counterpart: how gradients and weights travel is the strategy's (strategy_options), and torch's"
WATCH = "no counterpart as such: in the script, accelerator.profile() says where time and memory go"
LOG = "in the script: accelerator.log(values, step), which writes JSON lines, or to the trackers of log_with"
OURS = {"lamb": "LAMB", "fusedlamb": "LAMB", "lion": "Lion", "fusedlion": "Lion", "cpulion": "Lion"}
ADAMS = ("adam", "fusedadam", "cpuadam", "deepspeedcpuadam")  # AdamW, unless they are told otherwise
MOST_POWER = 127
CYCLES = ("OneCycle", "LRRangeTest")  # easymp.compat.deepspeed has them, with DeepSpeed's arguments
# The factor of update i; `optimizer` is made with the largest learning rate. DeepSpeed's warm-up follows the logarithm by default.
RISE = {"log": "math.log(i + 1) / math.log({warm})", "linear": "i / {warm}"}
FALL = {
    "WarmupLR": "1.0",
    "WarmupDecayLR": "max(0.0, ({total} - i) / ({total} - {warm}))",
    "WarmupCosineLR": "{low} + (1 - {low}) * (1 + math.cos(math.pi * (i - {warm}) / ({total} - {warm}))) / 2",
}


def strategy(content: Mapping[str, Any]) -> str | None:
    """What the file asks for; None where "auto" does it: ddp on several processes."""
    zero, split = content.get("zero_optimization"), content.get("tensor_parallel")
    size = split.get("autotp_size", 0) if isinstance(split, Mapping) else 0
    if isinstance(size, int) and size > 1:
        return "tensor_parallel"
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    return {1: "zero1", 2: "fsdp", 3: "fsdp"}.get(stage) if isinstance(stage, int) else None


def check(take: Taking) -> None:
    """Refuse what contradicts itself, and say what holds although it is not written."""
    on = [name for name in ("fp16", "bf16", "amp") if _enabled(take, name)]
    if len(on) > 1:
        raise SettingError(
            f"{take.document.where(on[1])}: {' and '.join(on)} are enabled at once: turn one of them off"
        )
    if "gradient_clipping" not in take.document.content:
        take.lines.append(
            (
                "(no gradient_clipping)",
                f"DeepSpeed clips at 1.0 then, since mid-2026; {CLIP.format(value=1.0)}, if it did",
            )
        )


def _enabled(take: Taking, name: str) -> bool:
    found = take.document.content.get(name)
    return isinstance(found, Mapping) and found.get("enabled") is True


def _precision(name: str) -> Rule:
    notes = {
        "fp16": "; weights stay in fp32, and products run in fp16 (fp16 weights with fp32 masters are mixed_precision O2)"
    }
    notes["bf16"] = "; weights stay in fp32, and products run in bf16"

    def rule(take: Taking, value: Any) -> str:
        if value == "auto":
            return AUTO
        return take.set("mixed_precision", name) + notes[name] if take.yes(value) else "nothing to take: off"

    return rule


def _of_fp16(meaning: Rule) -> Rule:
    def rule(take: Taking, value: Any) -> str:
        if value == "auto":
            return AUTO
        return meaning(take, value) if _enabled(take, "fp16") else "nothing to take: fp16 is not enabled"

    return rule


def _scale(take: Taking, value: Any) -> str:
    number = take.number(value)
    return (
        take.scale(init_scale=float(number), dynamic=False)
        if number
        else "nothing to take: dynamic, as by default"
    )


def _power(take: Taking, value: Any) -> str:
    if take.document.content["fp16"].get("loss_scale"):
        return "nothing to take: the scale is a static one"
    if take.number(value) > MOST_POWER:
        raise take.wrong(value, f"is above {MOST_POWER}, where 2 to it is no fp32 number")
    return take.scale(init_scale=2.0**value) if value != 16 else "nothing to take: as by default"


def _least(take: Taking, value: Any) -> str:
    return take.scale(min_scale=float(take.number(value)))


def _amp(take: Taking, value: Any) -> str:
    if not take.yes(value):
        return "nothing to take: off"
    return take.set("mixed_precision", take.document.content["amp"].get("opt_level", "O1"))


def _amp_level(take: Taking, value: Any) -> str:
    return (
        take.set("mixed_precision", str(value))
        if _enabled(take, "amp")
        else "nothing to take: amp is not enabled"
    )


def _steps(take: Taking, value: Any) -> str:
    return AUTO if value == "auto" else take.set("gradient_accumulation_steps", value)


def _clip(take: Taking, value: Any) -> str:
    if value == "auto" or not take.number(value):
        return AUTO if value == "auto" else "nothing to take: off"
    return CLIP.format(value=value)


def _micro(take: Taking, value: Any) -> str:
    if value == "auto":
        return AUTO
    return f"in the script: DataLoader(..., batch_size={take.number(value, 1, True)}), for a loader's batches are one process's"


def _batch(take: Taking, value: Any) -> str:
    if value == "auto":
        return AUTO
    total, content = take.number(value, 1, True), take.document.content
    micro, steps = (
        _count(content.get(key)) for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    if micro and steps:
        if total % (micro * steps):
            raise take.wrong(
                value,
                f"is no multiple of {micro} (a micro-batch) times {steps} (accumulation): correct one of the three",
            )
        return f"nothing to take: {micro} x {steps} on {total // (micro * steps)} processes"
    if micro:
        return f"in the script or by hand: gradient_accumulation_steps = {total} / ({micro} x processes)"
    many = f" x {steps}" if steps > 1 else ""
    return f"in the script: DataLoader(..., batch_size=...) of {total} / (processes{many}); accelerator.prepare says the product"


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _zero(take: Taking, value: Any) -> str:
    if value == "auto":
        return AUTO
    stage = take.number(value, whole=True)
    if stage > 3:
        raise take.wrong(value, "is no stage of ZeRO, 0 to 3")
    if take.spread is None:
        return "nothing to take: strategy auto, which is ddp on several processes"
    kept = f"; {take.option(reshard_after_forward=False)}" if stage == 2 else ""
    return f"{take.set('strategy', take.spread)}{kept}"


def _offload(take: Taking, value: Any) -> str:
    if value in OFF:
        return "nothing to take: off"
    if value == "nvme":
        return f"{DISK}; cpu_offload of strategy fsdp moves to the host's memory"
    if value not in ("cpu", True):
        raise take.wrong(value, "is none of none, cpu and nvme")
    return f"{take.option(cpu_offload=True)}: weights, gradients and states together"


def _split(take: Taking, value: Any) -> str:
    if take.number(value, whole=True) < 2:
        return "nothing to take: off"
    return f"{take.set('strategy', 'tensor_parallel')}; {take.option(size=value)}"


def _typed(take: Taking, value: Any) -> tuple[str, Mapping[str, Any]]:
    """The two keys of an optimizer or scheduler."""
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        raise take.wrong(value, 'has no "type"')
    unknown = [key for key in value if key not in ("type", "params", "legacy_fusion")]
    params = value.get("params") or {}
    if unknown or not isinstance(params, Mapping):
        raise take.wrong(
            value,
            f"has {unknown[0]!r} beside type and params"
            if unknown
            else "has params that are no keys and values",
        )
    return value["type"], params


def _optimizer(take: Taking, value: Any) -> str:
    if value in OFF:
        return "nothing to take: the script's own"
    name, given = _typed(take, value)
    lower = name.lower()
    params = {k: v for k, v in given.items() if v != "auto"}
    classes = {c.lower(): c for c in dir(torch.optim) if isinstance(getattr(torch.optim, c), type)}
    if lower in (*ADAMS, "adamw") and not params.get("torch_adam"):
        params.setdefault("weight_decay", 0.0)  # of DeepSpeed's Adams; torch's AdamW has 0.01
    if lower in ADAMS:
        lower = "adamw" if params.pop("adam_w_mode", True) else "adam"
    if lower in OURS:
        room, kind = "easymp.optim", getattr(optim, OURS[lower])
    elif lower in classes:
        room, kind = "torch.optim", getattr(torch.optim, classes[lower])
    else:
        return f"no counterpart: {name}{nearest(name, [*classes.values(), *OURS.values()]) or ', which torch.optim does not have'}"
    known = inspect.signature(kind).parameters
    told = "".join(
        f", {k}={tuple(v) if isinstance(v, list) else v!r}" for k, v in params.items() if k in known
    )
    lost = [f"{k}={v}" for k, v in params.items() if k not in known]
    return f"in the script: {room}.{kind.__name__}(model.parameters(){told})" + (
        f"; no counterpart: {', '.join(lost)}" if lost else ""
    )


def _scheduler(take: Taking, value: Any) -> str:
    if value in OFF:
        return "nothing to take: the script's own"
    name, params = _typed(take, value)
    room = torch.optim.lr_scheduler
    if name in FALL:
        warm, total = params.get("warmup_num_steps", 1000), params.get("total_num_steps", "total")
        names = {
            "warm": _or(warm, "warm"),
            "total": _or(total, "total"),
            "low": _or(params.get("cos_min_ratio", 0.0001), "low"),
        }
        rise = RISE.get(str(params.get("warmup_type", "log")), RISE["log"]).format(**names)
        factor = f"lambda i: {rise} if i < {names['warm']} else {FALL[name].format(**names)}"
        top = params.get("warmup_max_lr")
        with_lr = f", with the optimizer's lr={top}" if top not in (None, "auto") else ""
        low = params.get("warmup_min_lr")
        without = (
            f"; no counterpart: warmup_min_lr={low}, it begins at 0"
            if low not in (None, 0, 0.0, "auto")
            else ""
        )
        return f"in the script: torch.optim.lr_scheduler.LambdaLR(optimizer, {factor}){with_lr}{without}"
    if name in CYCLES or isinstance(getattr(room, name, None), type):
        told = "".join(f", {k}={v!r}" for k, v in params.items() if v != "auto")
        home = "easymp.compat.deepspeed" if name in CYCLES else "torch.optim.lr_scheduler"
        return f"in the script: {home}.{name}(optimizer{told})"
    return (
        f"no counterpart: {name}{nearest(name, [*FALL, *CYCLES, *(n for n in dir(room) if n[0].isupper())])}"
    )


def _or(value: Any, name: str) -> Any:
    return name if value == "auto" else value


def _dtype(take: Taking, value: Any) -> str:
    return f"no counterpart: sums of low-precision gradients are kept in fp32, {spelled(value)} or not"


def _tracker(take: Taking, value: Any) -> str:
    if value in OFF or not isinstance(value, Mapping) or value.get("enabled") is not True:
        return "nothing to take: off"
    named = [take.settings.pop("log_with")] if "log_with" in take.settings else []
    return (
        f"{take.set('log_with', ','.join([*named, take.path[-1]]))}: what the script gives to accelerator.log"
    )


def _compile(take: Taking, value: Any) -> str:
    return take.set("compile", "model") if take.yes(value) else "nothing to take: off"


OFFLOAD: Rules = {
    "device": _offload,
    **dict.fromkeys(
        (
            "pin_memory",
            "buffer_count",
            "buffer_size",
            "max_in_cpu",
            "fast_init",
            "ratio",
            "pipeline",
            "super_offload",
            "cpuadam_cores_perc",
        ),
        when_on("no counterpart: FSDP2 moves shards as torch does"),
    ),
    **dict.fromkeys(("nvme_path", "pipeline_read", "pipeline_write"), when_on(DISK)),
}
ZERO: Rules = {
    "stage": _zero,
    "offload_optimizer": OFFLOAD,
    "offload_param": OFFLOAD,
    "cpu_offload": _offload,
    "cpu_offload_params": _offload,
    **dict.fromkeys(
        ("cpu_offload_use_pin_memory", "stage3_gather_fp16_weights_on_model_save"),
        when_on("nothing to take: old spelling"),
    ),
    "stage3_gather_16bit_weights_on_model_save": when_on(
        "in the script: accelerator.save_model(model, folder) writes whole weights"
    ),
    "zero_hpz_partition_size": when_on(
        'no counterpart as such: strategy = "hsdp" keeps a whole copy in {value} ranks, by shard_size'
    ),
    "mics_shard_size": lambda take, value: (
        'no counterpart as such: strategy = "hsdp" keeps a whole copy in so many ranks, by shard_size'
        if isinstance(value, int) and value > 0
        else "nothing to take: off"
    ),
    **dict.fromkeys(
        (
            *(
                "allgather_partitions",
                "allgather_bucket_size",
                "overlap_comm",
                "reduce_scatter",
                "reduce_bucket_size",
            ),
            *(
                "contiguous_gradients",
                "round_robin_gradients",
                "stage3_max_live_parameters",
                "stage3_max_reuse_distance",
            ),
            *(
                "stage3_prefetch_bucket_size",
                "stage3_param_persistence_threshold",
                "stage3_model_persistence_threshold",
            ),
            *(
                "stage3_module_granularity_threshold",
                "sub_group_size",
                "grad_hooks",
                "use_multi_rank_bucket_allreduce",
            ),
            *(
                "zero_quantized_weights",
                "zero_quantized_gradients",
                "zero_quantized_nontrainable_weights",
                "load_from_fp32_weights",
            ),
            *(
                "mics_hierarchical_params_gather",
                "memory_efficient_linear",
                "pipeline_loading_checkpoint",
                "elastic_checkpoint",
            ),
            *(
                "ignore_unused_parameters",
                "legacy_stage1",
                "override_module_apply",
                "log_trace_cache_warnings",
                "zenflow",
            ),
            *(
                "stage3_use_all_reduce_for_fetch_params",
                "allgather_sequential",
                "leaf_module",
                "save_muon_momentum_buffer_in_memory",
            ),
        ),
        "no counterpart: FSDP2 and DDP cut, gather and reduce as torch does",
    ),
}
DEEPSPEED: Rules = {
    "train_batch_size": _batch,
    "train_micro_batch_size_per_gpu": _micro,
    "gradient_accumulation_steps": _steps,
    "gradient_clipping": _clip,
    "optimizer": _optimizer,
    "scheduler": _scheduler,
    "zero_optimization": ZERO,
    "fp16": {
        "enabled": _precision("fp16"),
        "auto_cast": _of_fp16(
            lambda take, value: "nothing to take: inputs are cast by autocast, where products need it"
        ),
        "loss_scale": _of_fp16(_scale),
        "initial_scale_power": _of_fp16(_power),
        "loss_scale_window": _of_fp16(
            lambda take, value: take.scale(growth_interval=take.number(value, 1, True))
        ),
        "hysteresis": _of_fp16(lambda take, value: take.scale(hysteresis=take.number(value, 1, True))),
        "consecutive_hysteresis": _of_fp16(
            lambda take, value: (
                take.scale(refill_each_step=True) if take.yes(value) else "nothing to take: as by default"
            )
        ),
        "min_loss_scale": _of_fp16(_least),
        "fp16_master_weights_and_grads": when_on("no counterpart: masters are fp32"),
    },
    "bf16": {
        "enabled": _precision("bf16"),
        "immediate_grad_update": when_on("no counterpart: gradients are added up as torch does"),
        "check_grad_overflow": when_on("no counterpart: bf16 has fp32's range"),
        "bf16_master_weights_and_grads": when_on("no counterpart: masters are fp32"),
        "bf16_optimizer_states": when_on(
            "in the script: easymp.optim.AdamW(..., state_dtype=torch.bfloat16)"
        ),
    },
    "amp": {"enabled": _amp, "opt_level": _amp_level},
    "torch_autocast": {
        "enabled": when_on("nothing to take: autocast is what mixed_precision does"),
        "dtype": when_on("no counterpart: mixed_precision says it"),
        "lower_precision_safe_modules": when_on("no counterpart: torch's autocast has its own lists"),
    },
    "tensor_parallel": {"autotp_size": _split, **dict.fromkeys(("tp_size", "tp", "dtype"), when_on(COMM))},
    "activation_checkpointing": dict.fromkeys(
        (
            *(
                "partition_activations",
                "cpu_checkpointing",
                "contiguous_memory_optimization",
                "number_checkpoints",
            ),
            *("synchronize_checkpoint_boundary", "profile"),
        ),
        when_on(
            "no counterpart: Accelerator(activation_checkpointing=True) computes repeated blocks again, and keeps their inputs whole"
        ),
    ),
    "compile": {
        "enabled": _compile,
        "backend": when_on("in the script: compile=CompileOptions(backend={value})"),
        "kwargs": when_on("in the script: compile=CompileOptions(...)"),
    },
    "data_types": {"grad_accum_dtype": _dtype},
    "zero_allow_untested_optimizer": "nothing to take: any torch optimizer is taken",
    "zero_force_ds_cpu_optimizer": "nothing to take: any torch optimizer is taken",
    "dataloader_drop_last": when_on("in the script: DataLoader(..., drop_last=True)"),
    "steps_per_print": "nothing to take: the script prints",
    "checkpoint": when_on("no counterpart: save_state says how checkpoints are written"),
    "prescale_gradients": when_on(
        "in the script: strategy_options={'gradient_predivide_factor': ...} under ddp"
    ),
    "gradient_predivide_factor": when_on(
        "in the script: strategy_options={'gradient_predivide_factor': {value}} under ddp"
    ),
    "fp32_allreduce": when_on("in the script: strategy_options={'comm_hook': 'fp32'} under ddp"),
    "communication_data_type": when_on("in the script: strategy_options={'comm_hook': '{value}'} under ddp"),
    "sparse_gradients": when_on(COMM),
    "seq_parallel_communication_data_type": when_on(COMM),
    "sequence_parallel_size": when_on(
        "no counterpart: attention over several ranks of one sequence is not offered"
    ),
    "disable_allgather": when_on(COMM),
    **dict.fromkeys(
        (
            *(
                "wall_clock_breakdown",
                "memory_breakdown",
                "dump_state",
                "flops_profiler",
                "comms_logger",
                "timers",
            ),
        ),
        when_on(WATCH),
    ),
    "tensorboard": _tracker,
    "wandb": _tracker,
    **dict.fromkeys(("comet", "csv_monitor", "monitor_config"), when_on(LOG)),
    **dict.fromkeys(("aio", "nebula"), when_on(DISK)),
    "elasticity": when_on("in the launch: --max-restarts, and --nodes MIN:MAX"),
    "autotuning": when_on("in the shell: `easymp estimate` for memory"),
    **dict.fromkeys(
        (
            *(
                "compression_training",
                "data_efficiency",
                "curriculum_learning",
                "progressive_layer_drop",
                "eigenvalue",
            ),
            *(
                "quantize_training",
                "weight_quantization",
                "sparse_attention",
                "hybrid_engine",
                "inference",
                "pipeline",
            ),
            *(
                "use_data_before_expert_parallel_parallelism",
                "graph_harvesting",
                "data_efficiency_config",
                "checkpoint_engine",
            ),
        ),
        when_on("no counterpart: not a part of training that easymp has"),
    ),
}
