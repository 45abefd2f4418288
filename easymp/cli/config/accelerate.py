"""Files of ``accelerate config`` (Accelerate 1.15): the meaning of each key here.

Accelerate counts processes over all machines, easymp on each. Its sections for FSDP, DeepSpeed and Megatron-LM become a
strategy and its options.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import SettingError, nearest
from ...registry import ALIASES
from ...settings import as_table
from . import deepspeed
from .rules import (
    Document,
    Importer,
    Rule,
    Rules,
    accumulate,
    also_off,
    clip,
    is_off,
    read_document,
    switch,
    table,
)

DEVICES = ("MULTI_GPU", "MULTI_XPU", "MULTI_CPU")
ELSEWHERE = ("MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON", "XLA", "TPU")
ENGINES = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config", "MEGATRON_LM": "megatron_lm_config"}
KINDS = ("NO", *DEVICES, *ELSEWHERE, *ENGINES)
# FSDP1's ways to shard; 1 to 5, where a number stands.
SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
BY_NUMBER = {str(number): word for number, word in enumerate(SHARDING, 1)}
STAGES = {0: "ddp", 1: "zero1", 2: "fsdp", 3: "fsdp"}  # of ZeRO
ALONE = "nothing to take: strategy stays auto, for one process has nothing to share"


def import_file(path: str | Path) -> Importer:
    """Read a file that ``accelerate config`` wrote, with the file of DeepSpeed that it names, or one of DeepSpeed.

    Raises:
        SettingError: no such file, one of neither library, not readable, or a wrong value; with the line.
    """
    return import_document(read_document(path), Path(path).parent)


def import_document(document: Document, folder: Path) -> Importer:
    """As `import_file`, of a document that was read; a file that it names is in `folder`, or in the working directory."""
    path, content = document.name, document.content
    ours, theirs = (len(content.keys() & keys) for keys in (ACCELERATE, deepspeed.DEEPSPEED))
    if not ours and not theirs:
        raise SettingError(
            f"{path} is a configuration of neither Accelerate nor DeepSpeed: both lack {', '.join(map(str, content))}"
        )
    if theirs >= ours and "distributed_type" not in content:  # which Accelerate always writes
        take = Importer(document, "DeepSpeed", deepspeed.strategy(content))
        deepspeed.take_all(take)
        return take
    take = Importer(document, "Accelerate", None if _alone(content) else _strategy(content))
    take.walk(content, _in_force(content))
    named = _section(content, "deepspeed_config").get("deepspeed_config_file")
    if named and _kind(content) == "DEEPSPEED":
        beside = folder / str(named)  # Accelerate looks in the working directory only
        inner = read_document(named if Path(str(named)).is_file() else beside)
        take.begin(inner, "DeepSpeed", None if _alone(content) else deepspeed.strategy(inner.content))
        deepspeed.take_all(take)
    return take


def _in_force(content: Mapping[str, Any]) -> Rules:
    """`ACCELERATE`, but for the sections of engines that ``distributed_type`` does not name: Accelerate skips them, too."""
    kind = _kind(content)
    said = also_off(lambda take, value: f"not in force: distributed_type is {kind}")
    idle = [name for engine, name in ENGINES.items() if engine != kind]
    return {**ACCELERATE, **{name: dict.fromkeys(ACCELERATE[name], said) for name in idle}}


def _section(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = content.get(name)
    return found if isinstance(found, Mapping) else {}


def _kind(content: Mapping[str, Any]) -> str:
    kind = content.get("distributed_type")
    return "NO" if is_off(kind) else str(kind).upper()  # YAML reads a bare NO as false


def _alone(content: Mapping[str, Any]) -> bool:
    return content.get("num_processes") == 1


def _strategy(content: Mapping[str, Any]) -> str | None:
    """The strategy that does the file's parallelism; None where there is none."""

    def many(part: str, key: str) -> bool:
        found = _section(content, part).get(key)
        return isinstance(found, int) and found > 1

    split, megatron = "parallelism_config", "megatron_lm_config"
    kind = _kind(content)
    if kind not in (*DEVICES, *ENGINES):
        return None
    if many(split, "parallelism_config_tp_size"):
        return "tensor_parallel"
    if many(split, "parallelism_config_dp_shard_size"):
        return "hsdp" if many(split, "parallelism_config_dp_replicate_size") else "fsdp"
    if kind == "FSDP":
        fsdp = _section(content, "fsdp_config")
        words = (_sharding(fsdp.get(f"fsdp_{key}")) for key in ("sharding_strategy", "reshard_after_forward"))
        how = next((word for word in words if word in SHARDING), "")
        return "ddp" if how == "NO_SHARD" else "hsdp" if how.startswith("HYBRID") else "fsdp"
    if kind == "DEEPSPEED":
        stage = _section(content, "deepspeed_config").get("zero_stage")
        return STAGES.get(stage) if isinstance(stage, int) else None
    if kind == "MEGATRON_LM":
        tensor, pipe = (many(megatron, f"megatron_lm_{name}_degree") for name in ("tp", "pp"))
        spread = "zero1" if _section(content, megatron).get(f"{PREFIX}use_distributed_optimizer") else "ddp"
        return None if tensor and pipe else "tensor_parallel" if tensor else "pipeline" if pipe else spread
    return "ddp"


def _sharding(value: Any) -> str:
    word = str(value).upper()
    return BY_NUMBER.get(word, word)


# -- rules that look at the value


@also_off
def _distributed_type(take: Importer, value: Any) -> str:
    content, kind = take.document.content, _kind(take.document.content)
    if content.get("compute_environment") == "AMAZON_SAGEMAKER":
        return "no counterpart: `easymp launch` counts the accelerators of the machine that it runs on"
    if kind not in KINDS:
        raise take.wrong(value, f"is not one of {', '.join(KINDS)}{nearest(kind, KINDS)}")
    if kind in ELSEWHERE:
        return "no counterpart: easymp trains on CUDA, ROCm, XPU and MPS devices and on CPUs"
    if kind == "NO":
        return ALONE if "num_processes" in content else take.set("processes", 1)
    spread = _strategy(content)
    if spread is None and kind == "DEEPSPEED":
        named = _section(content, "deepspeed_config").get("deepspeed_config_file")
        return f"by zero_optimization in {named}" if named else "no ZeRO stage is named: strategy stays auto"
    if spread is None:
        return "no counterpart: tensor and pipeline parallelism at once; strategy stays auto"
    on_cpu = f", {take.set('cpu', True)}" if kind == "MULTI_CPU" else ""
    return (ALONE if _alone(content) else take.set("strategy", spread)) + on_cpu


def _processes(take: Importer, value: Any) -> str:
    machines = take.document.content.get("num_machines")
    if value == -1:
        return "nothing to take: one process an accelerator, as `easymp launch` does by itself"
    total = take.number(value, 1, True)
    if not isinstance(machines, int) or machines <= 1:
        return take.set("processes", total)
    if total % machines:
        return f"no counterpart: {total} processes do not divide among {machines} machines; pass --processes on each"
    return f"{take.set('processes', total // machines)}, on each of the {machines} machines"


def _machines(take: Importer, value: Any) -> str:
    number = take.number(value, 1, True)
    return "nothing to take: one machine" if number == 1 else take.set("nodes", str(number))


@also_off
def _machine(take: Importer, value: Any) -> str:
    if (take.document.content.get("num_machines") or 1) == 1:
        return "nothing to take: one machine"
    return f"not in a file that all machines read: `easymp launch --node-rank {value} ...` on this one"


@also_off
def _precision(take: Importer, value: Any) -> str:
    if value is None:
        return "nothing to take: DeepSpeed's own file says it"
    word = "no" if value is False else str(value)  # YAML reads a bare no as false
    return take.set("mixed_precision", ALIASES.get(word, word))


def _backend(take: Importer, value: Any) -> str:
    name = str(value).lower()
    usual = {"what": "model", **as_table(take.values.get("compile"))}
    return take.table("compile", **usual) if name == "inductor" else take.table("compile", backend=name)


def _compiled(**options: Any) -> Rule:
    """A rule for yes or no of ``dynamo_config``; None stands for the value."""

    def rule(take: Importer, value: Any) -> str:
        if is_off(_section(take.document.content, "dynamo_config").get("dynamo_backend")):
            return "nothing to take: no dynamo_backend is named"
        return take.table(
            "compile", **{k: str(value).lower() if v is None else v for k, v in options.items()}
        )

    return rule


@also_off
def _sharded(take: Importer, value: Any) -> str:
    word = _sharding(value)
    if word in ("TRUE", "NONE"):
        return "nothing to take: as by default"
    if word not in (*SHARDING, "FALSE"):
        raise take.wrong(value, f"is not one of {', '.join(SHARDING)}{nearest(str(value), SHARDING)}")
    kept = take.option(reshard_after_forward=False) if word in (SHARDING[1], SHARDING[4], "FALSE") else ""
    return "; ".join(filter(None, [f"strategy {take.strategy or 'auto'}" * (word != "FALSE"), kept]))


def _spread(words: str, option: str = "") -> Rule:
    """A number above 1 is a part of the strategy, and an option of it where it has such a one."""

    def rule(take: Importer, value: Any) -> str:
        number = take.number(value, 1, True)
        if number > 1 and option in take.known_options:
            return take.option(**{option: number})
        return "nothing to take: off" if number == 1 else f"strategy {take.strategy or 'auto'}{words}"

    return rule


# -- the tables

PREFIX = "megatron_lm_"  # of the keys in the file
MEGATRON = {
    "tp_degree": _spread("", "size"),
    "pp_degree": _spread(": as many stages as processes"),
    "num_micro_batches": lambda take, value: take.option(microbatches=take.number(value, 1, True)),
    "sequence_parallelism": lambda take, value: take.option(sequence_parallel=take.yes(value)),
    "recompute_activations": switch("activation_checkpointing", "blocks"),
    "gradient_clipping": clip,
}
ACCELERATE = table(
    "accelerate",
    distributed_type=_distributed_type,
    mixed_precision=_precision,
    fp16=switch("mixed_precision", "fp16"),
    num_processes=_processes,
    num_machines=_machines,
    machine_rank=_machine,
    main_process_ip=lambda take, value: take.set("main_address", value),
    main_process_port=lambda take, value: take.set("main_port", value),
    gradient_accumulation_steps=accumulate,
    use_cpu=switch("cpu"),
    debug=switch("debug"),
    dynamo_backend=_backend,
    dynamo_config=table(
        "accelerate",
        "dynamo_config",
        dynamo_backend=_backend,
        dynamo_use_regional_compilation=_compiled(what="blocks"),
        dynamo_mode=_compiled(mode=None),
        dynamo_use_fullgraph=_compiled(fullgraph=True),
        dynamo_use_dynamic=_compiled(dynamic=True),
    ),
    fsdp_config=table(
        "accelerate",
        "fsdp_config",
        fsdp_sharding_strategy=_sharded,
        fsdp_reshard_after_forward=_sharded,
        fsdp_offload_params=lambda take, value: take.option(cpu_offload=take.yes(value)),
        fsdp_transformer_layer_cls_to_wrap=lambda take, value: take.option(
            wrap=[name.strip() for name in str(value).split(",") if name.strip()]
        ),
        fsdp_min_num_params=lambda take, value: take.option(wrap=int(take.number(value, 1))),
        fsdp_activation_checkpointing=switch("activation_checkpointing", "blocks"),
    ),
    deepspeed_config=table(
        "accelerate",
        "deepspeed_config",
        zero_stage=deepspeed.stage,
        gradient_accumulation_steps=accumulate,
        gradient_clipping=clip,
        offload_optimizer_device=deepspeed.offload,
        offload_param_device=deepspeed.offload,
    ),
    parallelism_config=table(
        "accelerate",
        "parallelism_config",
        parallelism_config_tp_size=_spread("", "size"),
        parallelism_config_dp_shard_size=_spread("", "shard_size"),
        parallelism_config_dp_replicate_size=_spread(": as many copies as processes allow"),
    ),
    megatron_lm_config=table(
        "accelerate", "megatron_lm_config", **{PREFIX + key: rule for key, rule in MEGATRON.items()}
    ),
    fp8_config=table("accelerate", "fp8_config"),
    mpirun_config=table("accelerate", "mpirun_config"),
    ipex_config=table("accelerate", "ipex_config"),
)
