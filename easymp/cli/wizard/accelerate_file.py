"""What ``accelerate config`` writes (Accelerate 1.15), key by key, and what each key is here.

Accelerate counts processes over all machines, easymp on each. Its sections for FSDP, DeepSpeed and Megatron-LM become a strategy; their
options are no settings but arguments of the script's `Accelerator`, and are said as such.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import nearest
from ...precision import ALIASES
from .taking import CLIP, OFF, Rule, Rules, Taking, when_on

DEVICES = ("MULTI_GPU", "MULTI_XPU", "MULTI_CPU")
ELSEWHERE = ("MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON", "XLA", "TPU")
ENGINES = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
KINDS = ("NO", *DEVICES, *ELSEWHERE, *ENGINES)
SHARDING = (
    "FULL_SHARD",
    "SHARD_GRAD_OP",
    "NO_SHARD",
    "HYBRID_SHARD",
    "HYBRID_SHARD_ZERO2",
)  # 1 to 5, where a number stands
BY_NUMBER = {str(number): word for number, word in enumerate(SHARDING, 1)}
TPU = "no counterpart: a setting of TPUs, which easymp does not know"
MEGATRON = "no counterpart: an option of Megatron-LM's own models"
ALONE = "one process, for which nothing is spread: strategy stays auto"


def section(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = content.get(name)
    return found if isinstance(found, Mapping) else {}


def by_stage(stage: Any) -> str | None:
    """The strategy that does what a stage of ZeRO does."""
    return {0: "ddp", 1: "zero1", 2: "fsdp", 3: "fsdp"}.get(stage) if isinstance(stage, int) else None


def sharding(fsdp: Mapping[str, Any]) -> str:
    """One of `SHARDING`; FSDP1's word for it may stand under two keys, as a name or a number."""
    for key in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"):
        word = str(fsdp.get(key, "")).upper()
        if word in SHARDING:
            return word
        if word in BY_NUMBER:
            return BY_NUMBER[word]
    return SHARDING[0]


def alone(content: Mapping[str, Any]) -> bool:
    return content.get("num_processes") == 1


def strategy(content: Mapping[str, Any]) -> str | None:
    """What the whole file asks for; None where nothing does it here, and for one process."""
    return None if alone(content) else asked(content)


def asked(content: Mapping[str, Any]) -> str | None:
    """The same, whatever the number of processes."""
    kind = str(content.get("distributed_type", "NO")).upper()
    if kind not in (*DEVICES, *ENGINES):
        return None
    split = section(content, "parallelism_config")
    wide, copies, shards = (
        _size(split, f"parallelism_config_{key}") for key in ("tp_size", "dp_replicate_size", "dp_shard_size")
    )
    if wide > 1:
        return "tensor_parallel"
    if shards > 1:
        return "hsdp" if copies > 1 else "fsdp"
    if kind == "FSDP":
        how = sharding(section(content, "fsdp_config"))
        return "ddp" if how == "NO_SHARD" else "hsdp" if how.startswith("HYBRID") else "fsdp"
    if kind == "DEEPSPEED":
        return by_stage(section(content, "deepspeed_config").get("zero_stage"))
    if kind == "MEGATRON_LM":
        megatron = section(content, "megatron_lm_config")
        tensor, pipe = (_size(megatron, f"megatron_lm_{name}_degree") for name in ("tp", "pp"))
        if tensor > 1 and pipe > 1:
            return None
        spread = "zero1" if megatron.get("megatron_lm_use_distributed_optimizer") else "ddp"
        return "tensor_parallel" if tensor > 1 else "pipeline" if pipe > 1 else spread
    return "ddp" if kind in DEVICES else None


def _size(split: Mapping[str, Any], key: str) -> int:
    found = split.get(key)
    return found if isinstance(found, int) and not isinstance(found, bool) else 1


def _environment(take: Taking, value: Any) -> str:
    if value == "AMAZON_SAGEMAKER":
        return "no counterpart: SageMaker starts jobs with its own tools; let its entry point call `easymp launch script.py`"
    return "nothing to take: this machine is where it runs"


def _kind(take: Taking, value: Any) -> str:
    content, kind = take.document.content, "NO" if value in OFF else str(value).upper()
    if content.get("compute_environment") == "AMAZON_SAGEMAKER":
        return "no counterpart: `easymp launch` counts the accelerators of the machine that it runs on"
    if kind not in KINDS:
        raise take.wrong(value, f"is not one of {', '.join(KINDS)}{nearest(kind, KINDS)}")
    if kind in ELSEWHERE:
        return "no counterpart: easymp trains on CUDA, ROCm, XPU and MPS devices and on CPUs"
    if kind == "NO":
        return (
            take.launch("processes", 1) if "num_processes" not in content else "nothing to take: one process"
        )
    spread = asked(content)
    if spread is None and kind == "DEEPSPEED":
        named = section(content, "deepspeed_config").get("deepspeed_config_file")
        return f"by zero_optimization in {named}" if named else "no ZeRO stage is named: strategy stays auto"
    if spread is None:
        return "no counterpart: tensor and pipeline parallelism at once; strategy stays auto"
    on_cpu = f", {take.set('cpu', True)}" if kind == "MULTI_CPU" else ""
    return (f"nothing to take: {ALONE}" if alone(content) else take.set("strategy", spread)) + on_cpu


def _processes(take: Taking, value: Any) -> str:
    machines = take.document.content.get("num_machines") or 1
    if value in (None, -1):
        return "nothing to take: one process an accelerator, as `easymp launch` does by itself"
    total = take.number(value, least=1, whole=True)
    if not isinstance(machines, int) or machines <= 1:
        return take.launch("processes", total)
    if total % machines:
        return (
            f"no counterpart: {total} processes do not divide among {machines} machines; say --processes on each of them to "
            "`easymp launch`"
        )
    return f"{take.launch('processes', total // machines)}, on each of the {machines} machines"


def _machines(take: Taking, value: Any) -> str:
    number = take.number(value, least=1, whole=True)
    return "nothing to take: one machine" if number == 1 else take.launch("nodes", str(number))


def _machine(take: Taking, value: Any) -> str:
    if (take.document.content.get("num_machines") or 1) == 1:
        return "nothing to take: one machine"
    return f"not in a file that all machines read: `easymp launch --node-rank {value} ...` on this one"


def _precision(take: Taking, value: Any) -> str:
    if value is None:
        return "nothing to take: DeepSpeed's own file says it"
    word = "no" if value is False else str(value)  # YAML reads a bare no as false
    return take.set("mixed_precision", ALIASES.get(word, word))


def _on(name: str) -> Rule:
    return lambda take, value: take.set(name, True) if take.yes(value) else "nothing to take: off"


def _gpus(take: Taking, value: Any) -> str:
    if value in (None, "all"):
        return "nothing to take: all"
    return f"no counterpart: write CUDA_VISIBLE_DEVICES={value} before the command"


def _port(take: Taking, value: Any) -> str:
    return "nothing to take: a free one is found" if value in (None, 0) else take.launch("main_port", value)


def _address(take: Taking, value: Any) -> str:
    return "nothing to take: this machine" if value in OFF else take.launch("main_address", value)


def _backend(take: Taking, value: Any) -> str:
    name = str(value).lower()
    return "nothing to take: off" if value in OFF else take.argument(dynamo_backend=name)


def _dynamo(text: str) -> Rule:
    def rule(take: Taking, value: Any) -> str:
        return (
            "nothing to take: as by default"
            if value in (*OFF, "default")
            else f"in the script: compile=CompileOptions({text})"
        )

    return rule


def _sharded(take: Taking, value: Any) -> str:
    word = sharding({"fsdp_sharding_strategy": value})
    if isinstance(value, bool):
        return "nothing to take: as by default" if value else take.option(reshard_after_forward=False)
    if word != str(value).upper() and str(value) not in BY_NUMBER:
        raise take.wrong(value, f"is not one of {', '.join(SHARDING)}{nearest(str(value), SHARDING)}")
    kept = f"; {take.option(reshard_after_forward=False)}" if word in (SHARDING[1], SHARDING[4]) else ""
    return f"strategy {take.spread or 'auto'}{kept}"


def _offload(take: Taking, value: Any) -> str:
    return take.option(cpu_offload=True) if take.yes(value) else "nothing to take: off"


def _wrap(take: Taking, value: Any) -> str:
    if value == "NO_WRAP":
        return "no counterpart: fsdp gathers block by block where a model has blocks"
    return "nothing to take: fsdp finds repeated blocks by itself, and what the next keys say goes before"


def _classes(take: Taking, value: Any) -> str:
    names = tuple(name.strip() for name in str(value or "").split(",") if name.strip())
    return take.option(wrap=names) if names else "nothing to take: none named"


def _smallest(take: Taking, value: Any) -> str:
    return take.option(wrap=int(take.number(value, least=1))) if value else "nothing to take: none named"


def _recompute(take: Taking, value: Any) -> str:
    return take.set("activation_checkpointing", "blocks") if take.yes(value) else "nothing to take: off"


def _stage(take: Taking, value: Any) -> str:
    stage = take.number(value, whole=True)
    if by_stage(stage) is None:
        raise take.wrong(value, "is no stage of ZeRO, 0 to 3")
    if take.spread is None:
        return f"nothing to take: {ALONE}"
    kept = f"; {take.option(reshard_after_forward=False)}" if stage == 2 else ""
    return f"{take.set('strategy', by_stage(stage))}{kept}"


def _to_host(take: Taking, value: Any) -> str:
    if value in OFF:
        return "nothing to take: off"
    if value == "nvme":
        return "no counterpart: nothing is moved to disks; cpu_offload of strategy fsdp moves to the host's memory"
    return f"{take.option(cpu_offload=True)}: weights, gradients and states together, under strategy fsdp"


def _steps(take: Taking, value: Any) -> str:
    return (
        "nothing to take: the script says it"
        if value == "auto"
        else take.set("gradient_accumulation_steps", value)
    )


def _clip(take: Taking, value: Any) -> str:
    if value in (*OFF, "auto"):
        return "nothing to take: off, or the script's"
    return CLIP.format(value=take.number(value))


def _wide(take: Taking, value: Any) -> str:
    return take.option(size=value) if take.number(value, least=1, whole=True) > 1 else "nothing to take: off"


def _shards(take: Taking, value: Any) -> str:
    number = take.number(value, least=1, whole=True)
    if number > 1 and "shard_size" in take.options:
        return take.option(shard_size=number)
    return "nothing to take: off" if number == 1 else f"strategy {take.spread or 'auto'}"


def _copies(take: Taking, value: Any) -> str:
    number = take.number(value, least=1, whole=True)
    return (
        "nothing to take: off"
        if number == 1
        else f"strategy {take.spread or 'auto'}: as many copies as processes allow"
    )


def _stages(take: Taking, value: Any) -> str:
    stages = take.number(value, least=1, whole=True)
    return (
        f"strategy {take.spread or 'auto'}: as many stages as processes"
        if stages > 1
        else "nothing to take: off"
    )


def _parts(take: Taking, value: Any) -> str:
    return (
        take.option(microbatches=take.number(value, least=1, whole=True)) if value else "nothing to take: off"
    )


def _sequence(take: Taking, value: Any) -> str:
    return take.option(sequence_parallel=True) if take.yes(value) else "nothing to take: off"


MACHINES = when_on("no counterpart: `easymp launch` on each machine that shall take part, or by Slurm")
FSDP: Rules = {
    "fsdp_version": "nothing to take: strategy fsdp is FSDP2",
    "fsdp_sharding_strategy": _sharded,
    "fsdp_reshard_after_forward": _sharded,
    "fsdp_offload_params": _offload,
    "fsdp_auto_wrap_policy": _wrap,
    "fsdp_transformer_layer_cls_to_wrap": _classes,
    "fsdp_min_num_params": _smallest,
    "fsdp_backward_prefetch": "no counterpart: FSDP2 gathers the next block ahead by itself",
    "fsdp_forward_prefetch": "no counterpart: FSDP2 gathers the next block ahead by itself",
    "fsdp_state_dict_type": "nothing to take: save_state writes shards, save_model whole weights",
    "fsdp_use_orig_params": "nothing to take: parameters keep their names always",
    "fsdp_cpu_ram_efficient_loading": when_on(
        'in the script: build the model under torch.device("meta"), and easymp.load_weights after prepare'
    ),
    "fsdp_sync_module_states": "nothing to take: all ranks begin with the same values",
    "fsdp_activation_checkpointing": _recompute,
    "fsdp_activation_checkpointing_offload": when_on(
        "no counterpart: what is kept of activations stays on the device"
    ),
}
DEEPSPEED: Rules = {
    "zero_stage": _stage,
    "gradient_accumulation_steps": _steps,
    "gradient_clipping": _clip,
    "offload_optimizer_device": _to_host,
    "offload_param_device": _to_host,
    "offload_optimizer_nvme_path": when_on("no counterpart: nothing is moved to disks"),
    "offload_param_nvme_path": when_on("no counterpart: nothing is moved to disks"),
    "zero3_init_flag": when_on(
        'in the script: build the model under torch.device("meta"); prepare gives values to what each rank holds'
    ),
    "zero3_save_16bit_model": when_on(
        "in the script: accelerator.save_model(model, folder) writes whole weights"
    ),
    "deepspeed_config_file": "read as well, below",
    "deepspeed_multinode_launcher": MACHINES,
    "deepspeed_hostfile": MACHINES,
    "deepspeed_exclusion_filter": MACHINES,
    "deepspeed_inclusion_filter": MACHINES,
    "deepspeed_moe_layer_cls_names": when_on("no counterpart: experts are not spread over processes"),
}
PARALLEL: Rules = {
    f"parallelism_config_{key}": rule
    for key, rule in {
        "tp_size": _wide,
        "dp_shard_size": _shards,
        "dp_replicate_size": _copies,
        **dict.fromkeys(
            (
                *("cp_size", "cp_backend", "cp_comm_strategy", "sp_size", "sp_backend", "sp_seq_length"),
                *("sp_seq_length_is_variable", "sp_attn_implementation"),
            ),
            "no counterpart: attention over several ranks of one sequence is not offered",
        ),
    }.items()
}
MEGATRON_LM: Rules = {
    f"megatron_lm_{key}": rule
    for key, rule in {
        "tp_degree": _wide,
        "pp_degree": _stages,
        "num_micro_batches": _parts,
        "sequence_parallelism": _sequence,
        "recompute_activations": _recompute,
        "use_distributed_optimizer": when_on(
            "as strategy zero1 does, alone: states of the optimizer in shards"
        ),
        "gradient_clipping": _clip,
        **dict.fromkeys(
            (
                *(
                    "use_custom_fsdp",
                    "no_load_optim",
                    "no_save_optim",
                    "eod_mask_loss",
                    "overlap_cpu_optimizer_d2h_h2d",
                ),
                *(
                    "optimizer_cpu_offload",
                    "use_precision_aware_optimizer",
                    "decoder_last_pipeline_num_layers",
                ),
                *("recompute_granularity", "recompute_method", "recompute_num_layers", "attention_backend"),
                *(
                    "expert_model_parallel_size",
                    "context_parallel_size",
                    "attention_dropout",
                    "hidden_dropout",
                ),
                *("attention_softmax_in_fp32", "expert_tensor_parallel_size", "calculate_per_token_loss"),
                "use_rotary_position_embeddings",
            ),
            when_on(MEGATRON),
        ),
    }.items()
}
DYNAMO: Rules = {
    "dynamo_backend": _backend,
    "dynamo_mode": _dynamo("mode=..."),
    "dynamo_use_fullgraph": _dynamo("fullgraph=True"),
    "dynamo_use_dynamic": _dynamo("dynamic=True"),
    "dynamo_use_regional_compilation": _dynamo('what="blocks"'),
}
FP8: Rules = dict.fromkeys(
    (
        *(
            "backend",
            "use_autocast_during_eval",
            "margin",
            "interval",
            "fp8_format",
            "amax_history_length",
            "amax_history_len",
        ),
        *(
            "amax_compute_algorithm",
            "amax_compute_algo",
            "override_linear_precision",
            "optimization_level",
            "opt_level",
        ),
        *("enable_fsdp_float8_all_gather", "pad_inner_dim"),
    ),
    "no counterpart: fp8 is torch's scaled products, one scale a tensor, without options",
)
ACCELERATE: Rules = {
    "compute_environment": _environment,
    "distributed_type": _kind,
    "mixed_precision": _precision,
    "fp16": lambda take, value: (
        take.set("mixed_precision", "fp16") if take.yes(value) else "nothing to take: off"
    ),
    "num_processes": _processes,
    "num_machines": _machines,
    "machine_rank": _machine,
    "main_process_ip": _address,
    "main_process_port": _port,
    "gradient_accumulation_steps": _steps,
    "use_cpu": _on("cpu"),
    "debug": _on("debug"),
    "gpu_ids": _gpus,
    "rdzv_backend": "nothing to take: machines meet at the first one's address",
    "same_network": "nothing to take: machines meet at the first one's address",
    "main_training_function": "nothing to take: a script is started, not a function in it; notebook_launcher starts functions",
    "enable_cpu_affinity": "nothing to take: `easymp launch` binds ranks to NUMA nodes by itself",
    "downcast_bf16": when_on(TPU),
    **dict.fromkeys(
        ("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env"), when_on(TPU)
    ),
    **dict.fromkeys(("commands", "command_file"), when_on(TPU)),
    "dynamo_backend": _backend,
    "dynamo_config": DYNAMO,
    "fsdp_config": FSDP,
    "deepspeed_config": DEEPSPEED,
    "parallelism_config": PARALLEL,
    "megatron_lm_config": MEGATRON_LM,
    "fp8_config": FP8,
    "mpirun_config": dict.fromkeys(("mpirun_hostfile", "mpirun_ccl"), MACHINES),
    "ipex_config": {"ipex": when_on("no counterpart: torch's own operations run on Intel CPUs and GPUs")},
    "use_xpu": "nothing to take: an XPU is found by itself",
    **dict.fromkeys(
        (
            *(
                "ec2_instance_type",
                "iam_role_name",
                "image_uri",
                "profile",
                "region",
                "base_job_name",
                "pytorch_version",
            ),
            *(
                "transformers_version",
                "py_version",
                "sagemaker_inputs_file",
                "sagemaker_metrics_file",
                "additional_args",
            ),
        ),
        when_on("no counterpart: of SageMaker's jobs"),
    ),
}


def rules_for(content: Mapping[str, Any]) -> Rules:
    """`ACCELERATE`, in which the sections of engines that `distributed_type` does not name say so: Accelerate passes them over, too."""
    kind = str(content.get("distributed_type", "NO")).upper()
    sections = {
        "FSDP": ("fsdp_config", FSDP),
        "DEEPSPEED": ("deepspeed_config", DEEPSPEED),
        "MEGATRON_LM": ("megatron_lm_config", MEGATRON_LM),
    }
    idle = {
        name: dict.fromkeys(keys, f"not in force: distributed_type is {kind}")
        for k, (name, keys) in sections.items()
        if k != kind
    }
    return {**ACCELERATE, **idle}
