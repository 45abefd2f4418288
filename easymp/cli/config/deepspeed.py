"""Files of DeepSpeed: the meaning of each key here.

Half of a file is about the script, which makes its own optimizer, scheduler and loader: the sentence is then the line to write.
`easymp.compat.deepspeed` takes the names of keys and optimizers from here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ... import optim
from ...errors import SettingError, nearest
from .rules import CLIP, OFF, Importer, Rule, Rules, accumulate, also_off, call, clip, each, is_off, switch

DISK = "no counterpart: nothing is moved to disks"
WHOLE = "in the script: accelerator.save_model(model, folder) writes whole weights"
OURS = {"lamb": "LAMB", "fusedlamb": "LAMB", "lion": "Lion", "fusedlion": "Lion", "cpulion": "Lion"}
ADAMS = ("adam", "fusedadam", "cpuadam", "deepspeedcpuadam")  # AdamW, unless adam_w_mode is false
SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
MOST_POWER = 127  # of 2, in fp32


def strategy(content: Mapping[str, Any]) -> str | None:
    """The strategy that the file asks for; None where "auto" does it, which is ddp on several processes."""
    zero, split = content.get("zero_optimization"), content.get("tensor_parallel")
    if isinstance(split, Mapping) and _count(split.get("autotp_size")) > 1:
        return "tensor_parallel"
    stage = zero.get("stage") if isinstance(zero, Mapping) else 0
    return {1: "zero1", 2: "fsdp", 3: "fsdp"}.get(stage) if isinstance(stage, int) else None


def take_all(take: Importer) -> None:
    """Apply the rules to the whole document of `take`.

    Raises:
        SettingError: a wrong value, or two precisions at once.
    """
    content = take.document.content
    sections = {name: content.get(name) for name in ("fp16", "bf16", "amp")}
    on = [name for name, one in sections.items() if isinstance(one, Mapping) and one.get("enabled") is True]
    if len(on) > 1:
        where = take.document.where((on[1],))
        raise SettingError(f"{where}: {' and '.join(on)} are enabled at once: turn one of them off")
    if "gradient_clipping" not in content:
        said = f"DeepSpeed clips at 1.0 then, since mid-2026; {CLIP.format(value=1.0)}, if it did"
        take.lines.append(("(no gradient_clipping)", said))
    take.walk(content, DEEPSPEED)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


# -- rules that look at the value


def _precision(name: str, note: str) -> Rule:
    return lambda take, value: take.set("mixed_precision", name) + note if take.yes(value) else OFF


def _power(take: Importer, value: Any) -> str:
    if not is_off(take.document.content["fp16"].get("loss_scale")):
        return "nothing to take: the loss scale is fixed"
    if take.number(value) > MOST_POWER:
        raise take.wrong(value, f"is above {MOST_POWER}, the largest power of 2 in fp32")
    return (
        "nothing to take: as by default" if value == 16 else take.scale(init_scale=2.0 ** take.number(value))
    )


def _batch(take: Importer, value: Any) -> str:
    total, content = take.number(value, 1, True), take.document.content
    micro = _count(content.get("train_micro_batch_size_per_gpu"))
    steps = _count(content.get("gradient_accumulation_steps"))
    if micro and steps and total % (micro * steps):
        why = (
            f"is not a multiple of {micro} (a micro-batch) times {steps} (accumulation): correct one of them"
        )
        raise take.wrong(value, why)
    if micro and steps:
        return f"nothing to take: {micro} x {steps} on {total // (micro * steps)} processes"
    if micro:
        return f"in the script or by hand: gradient_accumulation_steps = {total} / ({micro} x processes)"
    many = f" x {steps}" if steps > 1 else ""
    return f"in the script: DataLoader(..., batch_size=...) of {total} / (processes{many})"


@also_off
def stage(take: Importer, value: Any) -> str:
    """A stage of ZeRO: ddp, zero1, or fsdp, which keeps whole weights between forward and backward at stage 2."""
    number = take.number(value, whole=True)
    if number > 3:
        raise take.wrong(value, "is not a stage of ZeRO, 0 to 3")
    if take.strategy is None:
        return "nothing to take: strategy stays auto"
    kept = f"; {take.option(reshard_after_forward=False)}" if number == 2 else ""
    return f"{take.set('strategy', take.strategy)}{kept}"


def offload(take: Importer, value: Any) -> str:
    if value == "nvme":
        return f"{DISK}; cpu_offload of strategy fsdp moves to the host's memory"
    if value not in ("cpu", True):
        raise take.wrong(value, "is not one of none, cpu and nvme")
    return f"{take.option(cpu_offload=True)}: weights, gradients and states together, under strategy fsdp"


def _split(take: Importer, value: Any) -> str:
    if take.number(value, whole=True) < 2:
        return OFF
    return f"{take.set('strategy', 'tensor_parallel')}; {take.option(size=value)}"


def _typed(take: Importer, value: Any) -> tuple[str, dict[str, Any]]:
    """The type and the parameters of an optimizer or scheduler."""
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        raise take.wrong(value, 'has no "type"')
    params = value.get("params") or {}
    if unknown := value.keys() - {"type", "params", "legacy_fusion"} or not isinstance(params, Mapping):
        raise take.wrong(
            value, f"has {unknown} beside type" if unknown is not True else "has params without keys"
        )
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in params.items() if v != "auto"}
    return value["type"], given


def _optimizer(take: Importer, value: Any) -> str:
    import torch

    name, params = _typed(take, value)
    lower = name.lower()
    classes = {c.lower(): c for c in dir(torch.optim) if isinstance(getattr(torch.optim, c), type)}
    if lower in (*ADAMS, "adamw") and not params.get("torch_adam"):
        params.setdefault("weight_decay", 0.0)  # of DeepSpeed's Adams; torch's AdamW has 0.01
    if lower in ADAMS:
        lower = "adamw" if params.pop("adam_w_mode", True) else "adam"
    home, found = ("easymp.optim", OURS[lower]) if lower in OURS else ("torch.optim", classes.get(lower))
    if found is None:
        known = nearest(name, [*classes.values(), *OURS.values()]) or ", which torch.optim does not have"
        return f"no counterpart: {name}{known}"
    known = inspect.signature(getattr(optim if lower in OURS else torch.optim, found)).parameters
    lost = ", ".join(f"{k}={v}" for k, v in params.items() if k not in known)
    told = call(f"{home}.{found}", {k: v for k, v in params.items() if k in known}, "model.parameters()")
    return f"in the script: {told}{f'; no counterpart: {lost}' if lost else ''}"


def _scheduler(take: Importer, value: Any) -> str:
    from torch.optim import lr_scheduler

    name, params = _typed(take, value)
    if name in SCHEDULES or isinstance(getattr(lr_scheduler, name, None), type):
        home = "easymp.compat.deepspeed" if name in SCHEDULES else "torch.optim.lr_scheduler"
        return f"in the script: {call(f'{home}.{name}', params, 'optimizer')}"
    known = [*SCHEDULES, *(n for n in dir(lr_scheduler) if n[0].isupper())]
    return f"no counterpart: {name}{nearest(name, known)}"


def _tracker(take: Importer, value: Any) -> str:
    if not isinstance(value, Mapping) or value.get("enabled") is not True:
        return OFF
    named = [take.values.pop("log_with")] if "log_with" in take.values else []
    said = take.set("log_with", ",".join([*named, take.path[-1]]))
    return f"{said}: the tracker of accelerator.log"


# -- the tables

COMM = "no counterpart: how gradients and weights travel is the strategy's (strategy_options), and torch's"
HSDP = 'no counterpart as such: strategy = "hsdp" keeps a whole copy in {value} ranks, by shard_size'
HOOK = "in the script: strategy_options={'comm_hook': '{value}'} under ddp"
PREDIVIDE = "in the script: strategy_options={'gradient_predivide_factor': {value}} under ddp"
RECOMPUTE = 'no counterpart: activation_checkpointing = "blocks" computes repeated blocks again, and keeps their inputs'
OFFLOAD: Rules = {
    "device": offload,
    **each(
        "pin_memory buffer_count buffer_size max_in_cpu fast_init ratio pipeline super_offload cpuadam_cores_perc",
        "no counterpart: FSDP2 moves shards as torch does",
    ),
    **each("nvme_path pipeline_read pipeline_write", DISK),
}
ZERO: Rules = {
    "stage": stage,
    "offload_optimizer": OFFLOAD,
    "offload_param": OFFLOAD,
    **each("cpu_offload cpu_offload_params", offload),
    **each(
        "cpu_offload_use_pin_memory stage3_gather_fp16_weights_on_model_save", "nothing to take: old spelling"
    ),
    "stage3_gather_16bit_weights_on_model_save": WHOLE,
    "zero_hpz_partition_size": HSDP,
    "mics_shard_size": lambda take, value: HSDP.replace("{value}", str(value)) if _count(value) else OFF,
    **each(
        """allgather_partitions allgather_bucket_size overlap_comm reduce_scatter reduce_bucket_size
        contiguous_gradients round_robin_gradients stage3_max_live_parameters stage3_max_reuse_distance
        stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold
        stage3_module_granularity_threshold sub_group_size grad_hooks use_multi_rank_bucket_allreduce
        zero_quantized_weights zero_quantized_gradients zero_quantized_nontrainable_weights
        load_from_fp32_weights mics_hierarchical_params_gather memory_efficient_linear
        pipeline_loading_checkpoint elastic_checkpoint ignore_unused_parameters legacy_stage1
        override_module_apply log_trace_cache_warnings zenflow stage3_use_all_reduce_for_fetch_params
        allgather_sequential leaf_module save_muon_momentum_buffer_in_memory""",
        "no counterpart: FSDP2 and DDP cut, gather and reduce as torch does",
    ),
}
FP16: Rules = {
    "enabled": _precision("fp16", "; weights stay in fp32 (fp16 weights: mixed_precision O2)"),
    "auto_cast": "nothing to take: autocast casts inputs where products need it",
    "loss_scale": lambda take, value: take.scale(init_scale=float(take.number(value)), dynamic=False),
    "initial_scale_power": _power,
    "loss_scale_window": lambda take, value: take.scale(growth_interval=take.number(value, 1, True)),
    "hysteresis": lambda take, value: take.scale(hysteresis=take.number(value, 1, True)),
    "consecutive_hysteresis": lambda take, value: take.scale(refill_each_step=take.yes(value)),
    "min_loss_scale": lambda take, value: take.scale(min_scale=float(take.number(value))),
    "fp16_master_weights_and_grads": "no counterpart: masters are fp32",
}
BF16: Rules = {
    "enabled": _precision("bf16", "; weights stay in fp32, and products run in bf16"),
    "immediate_grad_update": "no counterpart: gradients are added up as torch does",
    "check_grad_overflow": "no counterpart: bf16 has fp32's range",
    "bf16_master_weights_and_grads": "no counterpart: masters are fp32",
    "bf16_optimizer_states": "in the script: easymp.optim.AdamW(..., state_dtype=torch.bfloat16)",
}
DEEPSPEED: Rules = {
    "train_batch_size": _batch,
    "train_micro_batch_size_per_gpu": lambda take, value: (
        f"in the script: DataLoader(..., batch_size={take.number(value, 1, True)}); a loader's batch is one process's"
    ),
    "gradient_accumulation_steps": accumulate,
    "gradient_clipping": clip,
    "optimizer": _optimizer,
    "scheduler": _scheduler,
    "zero_optimization": ZERO,
    "fp16": FP16,
    "bf16": BF16,
    "amp": {
        "enabled": lambda take, value: take.set(
            "mixed_precision", take.document.content["amp"].get("opt_level", "O1")
        ),
        "opt_level": lambda take, value: take.set("mixed_precision", str(value)),
    },
    "torch_autocast": {
        "enabled": "nothing to take: mixed_precision turns autocast on",
        "dtype": "no counterpart: mixed_precision says it",
        "lower_precision_safe_modules": "no counterpart: torch's autocast has its own lists",
    },
    "tensor_parallel": {"autotp_size": _split, **each("tp_size tp dtype", COMM)},
    "activation_checkpointing": each(
        """partition_activations cpu_checkpointing contiguous_memory_optimization number_checkpoints
        synchronize_checkpoint_boundary profile""",
        RECOMPUTE,
    ),
    "compile": {
        "enabled": switch("compile", "model"),
        "backend": "in the script: compile=CompileOptions(backend='{value}')",
        "kwargs": "in the script: compile=CompileOptions(...)",
    },
    "data_types": {"grad_accum_dtype": "no counterpart: sums of low-precision gradients are kept in fp32"},
    **each(
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
        "nothing to take: any torch optimizer is taken",
    ),
    "dataloader_drop_last": "in the script: DataLoader(..., drop_last=True)",
    "steps_per_print": "nothing to take: the script prints",
    "checkpoint": "no counterpart: save_state says how checkpoints are written",
    "prescale_gradients": PREDIVIDE.replace("{value}", "..."),
    "gradient_predivide_factor": PREDIVIDE,
    "fp32_allreduce": HOOK.replace("{value}", "fp32"),
    "communication_data_type": HOOK,
    **each("sparse_gradients seq_parallel_communication_data_type disable_allgather", COMM),
    "sequence_parallel_size": "no counterpart: attention over several ranks of one sequence is not offered",
    **each(
        "wall_clock_breakdown memory_breakdown dump_state flops_profiler comms_logger timers",
        "no counterpart as such: in the script, accelerator.profile() says where time and memory go",
    ),
    **each("tensorboard wandb", _tracker),
    **each("comet csv_monitor monitor_config", "in the script: accelerator.log(values, step), to JSON lines"),
    **each("aio nebula", DISK),
    "elasticity": "in the launch: --max-restarts, and --nodes MIN:MAX",
    "autotuning": "in the shell: `easymp estimate` for memory",
    **each(
        """compression_training data_efficiency curriculum_learning progressive_layer_drop eigenvalue
        quantize_training weight_quantization sparse_attention hybrid_engine inference pipeline
        use_data_before_expert_parallel_parallelism graph_harvesting data_efficiency_config checkpoint_engine""",
        "no counterpart: not a part of training that easymp has",
    ),
}
