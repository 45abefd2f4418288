"""Files of ``accelerate config`` (Accelerate 1.15) and of DeepSpeed, and flags of ``accelerate launch``: the meaning of each key here.

Accelerate counts processes over all machines, easymp on each. Its sections for FSDP, DeepSpeed and Megatron-LM become a strategy and
its options. Half of a DeepSpeed file is about the script, which makes its own optimizer, scheduler and loader: the sentence is then
the line to write. `easymp.compat.deepspeed` takes the names of optimizers from here.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ... import optim
from ...errors import RefusedError, SettingError, nearest
from ...registry import ALIASES
from ...settings import LAUNCHING, as_table
from .rules import (
    CLIP,
    OFF,
    Document,
    Importer,
    Rule,
    Rules,
    accumulate,
    also_off,
    call,
    clip,
    is_off,
    read_document,
    switch,
    table,
)

DEVICES = ("MULTI_GPU", "MULTI_XPU", "MULTI_CPU")  # kinds of distributed_type
ELSEWHERE = ("MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON", "XLA", "TPU")
ENGINES = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config", "MEGATRON_LM": "megatron_lm_config"}
KINDS = ("NO", *DEVICES, *ELSEWHERE, *ENGINES)
# FSDP1's ways to shard, 1 to 5.
SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
BY_NUMBER = {str(number): word for number, word in enumerate(SHARDING, 1)}
STAGES = {0: "ddp", 1: "zero1", 2: "fsdp", 3: "fsdp"}  # of ZeRO
ALONE = "nothing to take: strategy stays auto, for one process has nothing to share"
OURS = {"lamb": "LAMB", "fusedlamb": "LAMB", "lion": "Lion", "fusedlion": "Lion", "cpulion": "Lion"}
ADAMS = ("adam", "fusedadam", "cpuadam", "deepspeedcpuadam")  # AdamW, unless adam_w_mode is false
SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
SCALER = "scaler_options"
MOST_POWER = 127  # of 2, in fp32
BY_FLAG = {f"use_{name.lower()}": name for name in ENGINES} | {"multi_gpu": "MULTI_GPU"}
SWITCHES = {*BY_FLAG, "cpu", "debug", "same_network"}
REFUSED = ("no counterpart", "not in force", "unknown")


def import_file(path: str | Path) -> Importer:
    """Read a file that ``accelerate config`` wrote, with the file of DeepSpeed that it names, or one of DeepSpeed."""
    return import_document(read_document(path), Path(path).parent)


def import_document(document: Document, folder: Path) -> Importer:
    """As `import_file`, of a document that was read; a file that it names is in `folder`, or in the working directory."""
    path, content = document.name, document.content
    ours, theirs = (len(content.keys() & keys) for keys in (ACCELERATE, DEEPSPEED))
    if not ours and not theirs:
        known = ", ".join(map(str, content))
        raise SettingError(f"{path} is a file of neither Accelerate nor DeepSpeed: both lack {known}")
    if theirs >= ours and "distributed_type" not in content:  # which Accelerate always writes
        take = Importer(document, "DeepSpeed", _zero_strategy(content))
        _take_deepspeed(take)
        return take
    take = Importer(document, "Accelerate", None if _alone(content) else _strategy(content))
    take.walk(content, _in_force(content))
    named = _section(content, "deepspeed_config").get("deepspeed_config_file")
    if named and _kind(content) == "DEEPSPEED":
        beside = folder / str(named)  # Accelerate looks in the working directory only
        inner = read_document(named if Path(str(named)).is_file() else beside)
        take.begin(inner, "DeepSpeed", None if _alone(content) else _zero_strategy(inner.content))
        _take_deepspeed(take)
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


def _zero_strategy(content: Mapping[str, Any]) -> str | None:
    """The strategy that the file asks for; None where "auto" does it, which is ddp on several processes."""
    zero, split = content.get("zero_optimization"), content.get("tensor_parallel")
    if isinstance(split, Mapping) and _count(split.get("autotp_size")) > 1:
        return "tensor_parallel"
    stage = zero.get("stage") if isinstance(zero, Mapping) else 0
    return {1: "zero1", 2: "fsdp", 3: "fsdp"}.get(stage) if isinstance(stage, int) else None


def _take_deepspeed(take: Importer) -> None:
    """Apply the rules to the whole document of `take`."""
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


# -- DeepSpeed's keys, by rules that look at the value


def _precision(name: str, note: str) -> Rule:
    return lambda take, value: take.set("mixed_precision", name) + note if take.yes(value) else OFF


def _power(take: Importer, value: Any) -> str:
    if not is_off(take.document.content["fp16"].get("loss_scale")):
        return "nothing to take: the loss scale is fixed"
    if take.number(value) > MOST_POWER:
        raise take.wrong(value, f"is above {MOST_POWER}, the largest power of 2 in fp32")
    if value == 16:
        return "nothing to take: as by default"
    return take.table(SCALER, init_scale=2.0 ** take.number(value))


def _batch(take: Importer, value: Any) -> str:
    total, content = take.number(value, 1, True), take.document.content
    micro = _count(content.get("train_micro_batch_size_per_gpu"))
    steps = _count(content.get("gradient_accumulation_steps"))
    if micro and steps and total % (micro * steps):
        raise take.wrong(value, f"is not a multiple of {micro} (a micro-batch) times {steps} (accumulation)")
    if micro and steps:
        return f"nothing to take: {micro} x {steps} on {total // (micro * steps)} processes"
    if micro:
        return f"in the script or by hand: gradient_accumulation_steps = {total} / ({micro} x processes)"
    many = f" x {steps}" if steps > 1 else ""
    return f"in the script: DataLoader(..., batch_size=...) of {total} / (processes{many})"


@also_off
def _stage(take: Importer, value: Any) -> str:
    """Stage 2 keeps whole weights between forward and backward."""
    number = take.number(value, whole=True)
    if number > 3:
        raise take.wrong(value, "is not a stage of ZeRO, 0 to 3")
    if take.strategy is None:
        return "nothing to take: strategy stays auto"
    kept = f"; {take.option(reshard_after_forward=False)}" if number == 2 else ""
    return f"{take.set('strategy', take.strategy)}{kept}"


def _offload(take: Importer, value: Any) -> str:
    if value == "nvme":
        return "no counterpart: nothing is moved to disks; cpu_offload of strategy fsdp moves to the host's memory"
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
    unknown = [key for key in value if key not in ("type", "params", "legacy_fusion")]
    if unknown or not isinstance(params, Mapping):
        beside = f"has {unknown[0]!r} beside type and params" if unknown else "has params without keys"
        raise take.wrong(value, beside)
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


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


OFFLOAD = table("deepspeed", "offload", device=_offload)
FP16 = table(
    "deepspeed",
    "fp16",
    enabled=_precision("fp16", "; weights stay in fp32 (fp16 weights: mixed_precision O2)"),
    loss_scale=lambda take, value: take.table(SCALER, init_scale=float(take.number(value)), dynamic=False),
    initial_scale_power=_power,
    loss_scale_window=lambda take, value: take.table(SCALER, growth_interval=take.number(value, 1, True)),
    hysteresis=lambda take, value: take.table(SCALER, hysteresis=take.number(value, 1, True)),
    consecutive_hysteresis=lambda take, value: take.table(SCALER, refill_each_step=take.yes(value)),
    min_loss_scale=lambda take, value: take.table(SCALER, min_scale=float(take.number(value))),
)
DEEPSPEED = table(
    "deepspeed",
    train_batch_size=_batch,
    train_micro_batch_size_per_gpu=lambda take, value: (
        f"in the script: DataLoader(..., batch_size={take.number(value, 1, True)}); a loader's batch is one process's"
    ),
    gradient_accumulation_steps=accumulate,
    gradient_clipping=clip,
    optimizer=_optimizer,
    scheduler=_scheduler,
    zero_optimization=table(
        "deepspeed",
        "zero_optimization",
        stage=_stage,
        offload_optimizer=OFFLOAD,
        offload_param=OFFLOAD,
        cpu_offload=_offload,
        cpu_offload_param=_offload,
        cpu_offload_params=_offload,
    ),
    fp16=FP16,
    bf16=table(
        "deepspeed", "bf16", enabled=_precision("bf16", "; weights stay in fp32, products run in bf16")
    ),
    amp={
        "enabled": lambda take, _: take.set(
            "mixed_precision", take.document.content["amp"].get("opt_level", "O1")
        ),
        "opt_level": lambda take, value: take.set("mixed_precision", str(value)),
    },
    torch_autocast=table("deepspeed", "torch_autocast"),
    tensor_parallel=table("deepspeed", "tensor_parallel", autotp_size=_split),
    activation_checkpointing=table("deepspeed", "activation_checkpointing"),
    compile=table("deepspeed", "compile", enabled=switch("compile", "model")),
    data_types=table("deepspeed", "data_types"),
    tensorboard=_tracker,
    wandb=_tracker,
)


# -- Accelerate's keys, by rules that look at the value


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
def _mixed_precision(take: Importer, value: Any) -> str:
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
        given = {k: str(value).lower() if v is None else v for k, v in options.items()}
        return take.table("compile", **given)

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
    mixed_precision=_mixed_precision,
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
        zero_stage=_stage,
        gradient_accumulation_steps=accumulate,
        gradient_clipping=clip,
        offload_optimizer_device=_offload,
        offload_param_device=_offload,
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


# -- flags of accelerate launch

SECTIONS = {key: name for name, rules in ACCELERATE.items() if isinstance(rules, Mapping) for key in rules}


def translate(words: Sequence[str], own: Mapping[str, bool]) -> list[str]:
    """The command line behind ``--as accelerate`` in easymp's flags; `own` are these, and whether each takes a value."""
    content: dict[str, Any] = {}
    kept: list[str] = []
    rank: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-"):
        flag, equals, value = rest.pop(0).partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if flag in own and "_" not in flag:
            kept += [f"{flag}{equals}{value}", *([rest.pop(0)] if own[flag] and not equals and rest else [])]
            continue
        if name in SWITCHES:
            value = "true"
        elif not equals and not rest:
            raise SettingError(f"{flag} has no value")
        elif not equals:
            value = rest.pop(0)
        if name == "machine_rank":
            rank = ["--node-rank", value]
        elif name == "max_restarts":
            kept += ["--max-restarts", value]
        elif name == "config_file":
            content = {**read_document(value).content, **content}
        elif name in BY_FLAG:
            content["distributed_type"] = BY_FLAG[name]
        elif name == "cpu":
            content["use_cpu"] = True
        elif name in ACCELERATE:
            content[name] = _plain(value)
        elif name in SECTIONS:
            content.setdefault(SECTIONS[name], {})[name] = _plain(value)
        else:
            threads = f"set OMP_NUM_THREADS={value} in front of the command, and "
            way = threads * (name == "num_cpu_threads_per_process")
            raise RefusedError(f"{flag} of accelerate launch has no counterpart: {way}leave it out")
    if content.get("num_processes", 1) != 1 and "distributed_type" not in content:
        content["distributed_type"] = "MULTI_CPU" if content.get("use_cpu") else "MULTI_GPU"
    if content.get("num_machines", 1) == 1 and rank[1:] == ["0"]:
        rank = []
    return [*kept, *rank, *_flags(content), *rest]


def _flags(content: dict[str, Any]) -> Iterator[str]:
    """The settings in the content of a file of Accelerate's, as flags."""
    if not content:
        return
    found = import_document(Document("accelerate launch", content, ""), Path())
    for what, sentence in found.lines:
        if sentence.startswith(REFUSED):
            raise RefusedError(f"accelerate launch: {what}: {sentence}")
    port = found.values.pop("main_port", None)
    for name, value in found.values.items():
        if name in LAUNCHING:
            yield f"--{name.replace('_', '-')}"
            yield f"{value}:{port}" if name == "main_address" and port else str(value)
        elif isinstance(value, Mapping):
            for option, one in value.items():
                yield from ("--set", f"{name}.{option}={_word(one)}")
        else:
            yield from ("--set", f"{name}={_word(value)}")


def _plain(word: str) -> Any:
    try:
        return json.loads(word.lower() if word.lower() in ("true", "false") else word)
    except ValueError:
        return word


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
