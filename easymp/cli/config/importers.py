"""Files of ``accelerate config`` (Accelerate 1.15) and DeepSpeed, and flags of ``accelerate launch``, as settings.

Accelerate counts processes over all machines, easymp on each. Half of a DeepSpeed file is about the script, which makes
its own optimizer, scheduler and loader: the sentence is then the line to write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import RefusedError, SettingError, nearest
from ...registry import ALIASES
from ...settings import LAUNCHING
from .documents import Document, read_document
from .rules import KEYS, OFF, SENTENCES, ImportedSettings, Rule, Rules, accumulate, also_off, is_off, switch

DEVICES = ("MULTI_GPU", "MULTI_XPU", "MULTI_CPU")  # kinds of distributed_type
UNSUPPORTED = ("MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON", "XLA", "TPU")
ENGINES = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config", "MEGATRON_LM": "megatron_lm_config"}
KINDS = ("NO", *DEVICES, *UNSUPPORTED, *ENGINES)
# FSDP1's ways to shard, numbered from 1 to 5.
SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
STAGES = {0: "ddp", 1: "zero1", 2: "fsdp", 3: "fsdp"}  # of ZeRO
ONE_PROCESS = "nothing to take: strategy stays auto, for one process has nothing to share"
SCALER = "scaler_options"


def import_file(path: str | Path) -> ImportedSettings:
    """Read a file that ``accelerate config`` wrote, with the file of DeepSpeed that it names, or one of DeepSpeed."""
    return import_document(read_document(path), Path(path).parent)


def import_document(document: Document, folder: Path) -> ImportedSettings:
    """Import a document; a file that it names is in the working directory or in `folder`."""
    content = document.content
    accelerate_keys, deepspeed_keys = (len(content.keys() & keys) for keys in (ACCELERATE, DEEPSPEED))
    if not accelerate_keys and not deepspeed_keys:
        names = ", ".join(map(str, content))
        raise SettingError(f"{document.name} is a file of neither Accelerate nor DeepSpeed: both lack {names}")
    if deepspeed_keys >= accelerate_keys and "distributed_type" not in content:  # which Accelerate always writes
        settings = ImportedSettings(document, "DeepSpeed", _zero_strategy(content))
        _import_deepspeed(settings)
        return settings
    settings = ImportedSettings(document, "Accelerate", _strategy(content))
    kind = _kind(content)
    unused = {name: f"not in force: distributed_type is {kind}" for engine, name in ENGINES.items() if engine != kind}
    settings.walk(content, {**ACCELERATE, **unused})
    config_file = _section(content, "deepspeed_config").get("deepspeed_config_file")
    if config_file and kind == "DEEPSPEED":
        path = Path(str(config_file))  # Accelerate looks in the working directory only
        inner = read_document(path if path.is_file() else folder / path)
        settings.begin(inner, "DeepSpeed", None if _is_single(content) else _zero_strategy(inner.content))
        _import_deepspeed(settings)
    return settings


def _section(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = content.get(name)
    return section if isinstance(section, Mapping) else {}


def _kind(content: Mapping[str, Any]) -> str:
    kind = content.get("distributed_type")
    return "NO" if is_off(kind) else str(kind).upper()  # YAML reads a bare NO as false


def _is_single(content: Mapping[str, Any]) -> bool:
    return content.get("num_processes") == 1


def _strategy(content: Mapping[str, Any]) -> str | None:
    """The strategy that does the file's parallelism; None where there is none."""
    kind = _kind(content)
    if _is_single(content) or kind not in (*DEVICES, "FSDP", "DEEPSPEED"):
        return None
    if kind == "FSDP":
        fsdp = _section(content, "fsdp_config")
        values = [_sharding(fsdp.get(f"fsdp_{key}")) for key in ("sharding_strategy", "reshard_after_forward")]
        sharding = next((value for value in values if value in SHARDING), "")
        return "ddp" if sharding == "NO_SHARD" else "hsdp" if sharding.startswith("HYBRID") else "fsdp"
    if kind == "DEEPSPEED":
        stage = _section(content, "deepspeed_config").get("zero_stage")
        return STAGES.get(stage) if isinstance(stage, int) else None
    return "ddp"


def _sharding(value: Any) -> str:
    """The name of FSDP1's way to shard, also of its number."""
    name = str(value).upper()
    return dict(zip("12345", SHARDING)).get(name, name)


def _zero_strategy(content: Mapping[str, Any]) -> str | None:
    """The strategy that the file asks for; None where "auto" does it, which is ddp on several processes."""
    if _count(_section(content, "tensor_parallel").get("autotp_size")) > 1:
        return "tensor_parallel"
    stage = _section(content, "zero_optimization").get("stage")
    return STAGES.get(stage) if isinstance(stage, int) and stage else None


def _import_deepspeed(settings: ImportedSettings) -> None:
    content = settings.document.content
    enabled = [name for name in ("fp16", "bf16", "amp") if _section(content, name).get("enabled") is True]
    if len(enabled) > 1:
        names = " and ".join(enabled)
        raise SettingError(f"{settings.document.name}: {names} are enabled at once: turn one of them off")
    if "gradient_clipping" not in content:
        clip = KEYS[""]["gradient_clipping"].reason.replace("{value}", "1.0")
        settings.lines.append(
            ("(no gradient_clipping)", f"DeepSpeed clips at 1.0 then, since mid-2026; {clip}, if it did")
        )
    settings.walk(content, DEEPSPEED)


# -- DeepSpeed's keys, by rules that look at the value


def _scale_power(settings: ImportedSettings, value: Any) -> str:
    power = settings.number(value, highest=127)  # the largest power of 2 in fp32
    if not is_off(settings.document.content["fp16"].get("loss_scale")):
        return "nothing to take: the loss scale is fixed"
    return "nothing to take: as by default" if power == 16 else settings.table(SCALER, init_scale=2.0**power)


@also_off
def _stage(settings: ImportedSettings, value: Any) -> str:
    """Stage 2 keeps whole weights between forward and backward."""
    number = settings.number(value, highest=3, integer=True)
    if settings.strategy is None:
        return "nothing to take: strategy stays auto"
    options = f"; {settings.option(reshard_after_forward=False)}" if number == 2 else ""
    return f"{settings.set('strategy', settings.strategy)}{options}"


def _offload(settings: ImportedSettings, value: Any) -> str:
    if value == "nvme":
        return "no counterpart: nothing is moved to disks; cpu_offload of strategy fsdp moves to the host's memory"
    if value not in ("cpu", True):
        raise settings.wrong(value, "is not one of none, cpu and nvme")
    return f"{settings.option(cpu_offload=True)}: weights, gradients and states together, under strategy fsdp"


def _tensor_parallel(settings: ImportedSettings, value: Any) -> str:
    if settings.number(value, integer=True) < 2:
        return OFF
    return f"{settings.set('strategy', 'tensor_parallel')}; {settings.option(size=value)}"


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


# Keys by address; for the others the sentence of `KEYS` stands.
BY_VALUE: dict[str, Rule] = {
    "gradient_accumulation_steps": accumulate,
    "zero_optimization.stage": _stage,
    **{f"zero_optimization.offload_{name}.device": _offload for name in ("optimizer", "param")},
    **{f"zero_optimization.cpu_offload{suffix}": _offload for suffix in ("", "_param", "_params")},
    "fp16.enabled": switch("mixed_precision", "fp16"),
    "fp16.loss_scale": lambda s, value: s.table(SCALER, init_scale=float(s.number(value)), dynamic=False),
    "fp16.initial_scale_power": _scale_power,
    "fp16.loss_scale_window": lambda s, value: s.table(SCALER, growth_interval=s.number(value, 1, integer=True)),
    "fp16.hysteresis": lambda s, value: s.table(SCALER, hysteresis=s.number(value, 1, integer=True)),
    "fp16.consecutive_hysteresis": lambda s, value: s.table(SCALER, refill_each_step=s.boolean(value)),
    "fp16.min_loss_scale": lambda s, value: s.table(SCALER, min_scale=float(s.number(value))),
    "bf16.enabled": switch("mixed_precision", "bf16"),
    "tensor_parallel.autotp_size": _tensor_parallel,
    "compile.enabled": switch("compile", "model"),
}
AMP: Rules = {
    "enabled": lambda s, _: s.set("mixed_precision", s.document.content["amp"].get("opt_level", "O1")),
    "opt_level": lambda s, value: s.set("mixed_precision", str(value)),
}


def _deepspeed_rules(section: str = "") -> dict[str, Rule | str | Rules]:
    """Rules of a section's keys: by value, of sections inside of it, or the sentence of `KEYS`."""
    rules: dict[str, Rule | str | Rules] = {}
    for name, key in KEYS[section].items():
        address = f"{section}.{name}".lstrip(".")
        sentence = key.reason if key.kind == "honoured" else f"no counterpart: {key.reason}"
        rules[name] = BY_VALUE.get(address) or sentence or _deepspeed_rules(address)
    return rules


DEEPSPEED: Rules = {**_deepspeed_rules(), "amp": AMP}


# -- Accelerate's keys, by rules that look at the value


@also_off
def _distributed_type(settings: ImportedSettings, value: Any) -> str:
    content, kind = settings.document.content, _kind(settings.document.content)
    if content.get("compute_environment") == "AMAZON_SAGEMAKER":
        return "no counterpart: `easymp launch` counts the accelerators of the machine that it runs on"
    if kind not in KINDS:
        raise settings.wrong(value, f"is not one of {', '.join(KINDS)}{nearest(kind, KINDS)}")
    if kind in UNSUPPORTED:
        return "no counterpart: easymp trains on CUDA, ROCm, XPU and MPS devices and on CPUs"
    if kind == "NO":
        return ONE_PROCESS if "num_processes" in content else settings.set("processes", 1)
    on_cpu = f", {settings.set('cpu', True)}" if kind == "MULTI_CPU" else ""
    if _is_single(content):
        return ONE_PROCESS + on_cpu
    if settings.strategy is not None:
        return settings.set("strategy", settings.strategy) + on_cpu
    if kind == "DEEPSPEED":
        config_file = _section(content, "deepspeed_config").get("deepspeed_config_file")
        return f"by zero_optimization in {config_file}" if config_file else "no ZeRO stage: strategy stays auto"
    return "no counterpart: Megatron-LM has models of its own; strategies tensor_parallel and pipeline take torch's"


def _processes(settings: ImportedSettings, value: Any) -> str:
    machines = settings.document.content.get("num_machines")
    if value == -1:
        return "nothing to take: one process an accelerator, as `easymp launch` does by itself"
    total = settings.number(value, 1, integer=True)
    if not isinstance(machines, int) or machines <= 1:
        return settings.set("processes", total)
    if total % machines:
        return f"no counterpart: {total} processes do not divide among {machines} machines; pass --processes on each"
    return f"{settings.set('processes', total // machines)}, on each of the {machines} machines"


def _machines(settings: ImportedSettings, value: Any) -> str:
    number = settings.number(value, 1, integer=True)
    return "nothing to take: one machine" if number == 1 else settings.set("nodes", str(number))


@also_off
def _mixed_precision(settings: ImportedSettings, value: Any) -> str:
    if value is None:
        return "nothing to take: DeepSpeed's own file has it"
    name = "no" if value is False else str(value)  # YAML reads a bare no as false
    return settings.set("mixed_precision", ALIASES.get(name, name))


def _backend(settings: ImportedSettings, value: Any) -> str:
    name = str(value).lower()
    return settings.table("compile", **{"what": "model"} if name == "inductor" else {"backend": name})


def _dynamo_mode(settings: ImportedSettings, value: Any) -> str:
    backend = settings.document.content.get("dynamo_config", {}).get("dynamo_backend")
    return OFF if value == "default" or is_off(backend) else settings.table("compile", mode=str(value).lower())


@also_off
def _sharding_strategy(settings: ImportedSettings, value: Any) -> str:
    name = _sharding(value)
    if name in ("TRUE", "NONE"):
        return "nothing to take: as by default"
    if name not in (*SHARDING, "FALSE"):
        raise settings.wrong(value, f"is not one of {', '.join(SHARDING)}{nearest(str(value), SHARDING)}")
    sentences = [] if name == "FALSE" else [f"strategy {settings.strategy or 'auto'}"]
    if name in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2", "FALSE"):
        sentences.append(settings.option(reshard_after_forward=False))
    return "; ".join(sentences)


def _mesh_size(settings: ImportedSettings, value: Any) -> str:
    remedy = "write strategy and [strategy_options], as for hsdp and tensor_parallel"
    return OFF if settings.number(value, 1, integer=True) == 1 else f"no counterpart here: {remedy}"


# Rules by section; sentences.toml has the keys without an effect.
ACCELERATE_RULES: dict[str, dict[str, Rule]] = {
    "": {
        "distributed_type": _distributed_type,
        "mixed_precision": _mixed_precision,
        "fp16": switch("mixed_precision", "fp16"),
        "num_processes": _processes,
        "num_machines": _machines,
        "main_process_ip": lambda s, value: s.set("main_address", value),
        "main_process_port": lambda s, value: s.set("main_port", value),
        "gradient_accumulation_steps": accumulate,
        "use_cpu": switch("cpu"),
        "debug": switch("debug"),
        "dynamo_backend": _backend,
    },
    "dynamo_config": {
        "dynamo_backend": _backend,
        "dynamo_mode": _dynamo_mode,
    },
    "fsdp_config": {
        "fsdp_sharding_strategy": _sharding_strategy,
        "fsdp_reshard_after_forward": _sharding_strategy,
        "fsdp_offload_params": lambda s, value: s.option(cpu_offload=s.boolean(value)),
        "fsdp_transformer_layer_cls_to_wrap": lambda s, value: s.option(wrap=str(value).replace(",", " ").split()),
        "fsdp_min_num_params": lambda s, value: s.option(wrap=int(s.number(value, 1))),
        "fsdp_activation_checkpointing": switch("activation_checkpointing", "blocks"),
    },
    "parallelism_config": dict.fromkeys(
        (f"parallelism_config_{name}_size" for name in ("tp", "dp_shard", "dp_replicate")), _mesh_size
    ),
    "deepspeed_config": {
        "zero_stage": _stage,
        "gradient_accumulation_steps": accumulate,
        "offload_optimizer_device": _offload,
        "offload_param_device": _offload,
    },
}


def _accelerate_rules() -> Rules:
    """The rule of each key of Accelerate's files; a section's name maps to the rules of its keys."""
    rules: dict[str, Rule | str | Rules] = dict(ACCELERATE_RULES)
    top = dict[str, Rule | str | Rules](rules.pop(""))  # type: ignore[arg-type]
    for text, keys in SENTENCES["accelerate"].items():
        if isinstance(keys, str):
            top |= dict.fromkeys(keys.split(), text)
        else:
            texts = {key: sentence for sentence, names in keys.items() for key in names.split()}
            rules[text] = {**texts, **ACCELERATE_RULES.get(text, {})}
    return {**rules, **top}


ACCELERATE = _accelerate_rules()

# -- flags of accelerate launch

SECTION_OF = {key: name for name, rules in ACCELERATE.items() if isinstance(rules, Mapping) for key in rules}
ENGINE_FLAGS = {f"use_{name.lower()}": name for name in ENGINES} | {"multi_gpu": "MULTI_GPU"}
SWITCHES = {*ENGINE_FLAGS, "cpu", "debug", "same_network"}


def translate(arguments: Sequence[str], easymp_flags: Mapping[str, bool]) -> list[str]:
    """The command line behind ``--as accelerate`` in easymp's flags.

    `easymp_flags` has these, and whether each takes a value.
    """
    content: dict[str, Any] = {}
    flags: list[str] = []
    node_rank: list[str] = []
    remaining = list(arguments)
    while remaining and remaining[0].startswith("-"):
        flag, equals, value = remaining.pop(0).partition("=")
        name, is_easymp = flag.removeprefix("--").replace("-", "_"), flag in easymp_flags and "_" not in flag
        takes_value = easymp_flags[flag] if is_easymp else name not in SWITCHES
        if takes_value and not equals:
            if not remaining:
                raise SettingError(f"{flag} has no value")
            value = remaining.pop(0)
        if is_easymp:
            flags += [flag, value] if takes_value else [flag]
        elif name == "machine_rank":
            node_rank = ["--node-rank", value]
        elif name == "max_restarts":
            flags += ["--max-restarts", value]
        elif name == "config_file":
            content = {**read_document(value).content, **content}
        elif name in ENGINE_FLAGS:
            content["distributed_type"] = ENGINE_FLAGS[name]
        elif name == "cpu":
            content["use_cpu"] = True
        elif name in ACCELERATE:
            content[name] = _literal(value) if takes_value else True
        elif name in SECTION_OF:
            content.setdefault(SECTION_OF[name], {})[name] = _literal(value)
        else:
            threads = f"set OMP_NUM_THREADS={value} in front of the command, and "
            remedy = f"{threads if name == 'num_cpu_threads_per_process' else ''}leave it out"
            raise RefusedError(f"{flag} of accelerate launch has no counterpart: {remedy}")
    if content.get("num_processes", 1) != 1 and "distributed_type" not in content:
        content["distributed_type"] = "MULTI_CPU" if content.get("use_cpu") else "MULTI_GPU"
    if content.get("num_machines", 1) == 1 and node_rank[1:] == ["0"]:
        node_rank = []
    flags += node_rank
    # The settings in the content of a file of Accelerate's, as flags.
    settings = import_document(Document("accelerate launch", content), Path()) if content else None
    for key, sentence in settings.lines if settings else ():
        if sentence.startswith(("no counterpart", "not in force", "unknown")):
            raise RefusedError(f"accelerate launch: {key}: {sentence}")
    values = settings.values if settings else {}
    port = values.pop("main_port", None)
    for name, value in values.items():
        if name in LAUNCHING:
            address = f"{value}:{port}" if name == "main_address" and port else str(value)
            flags += [f"--{name.replace('_', '-')}", address]
            continue
        options = {f"{name}.{key}": option for key, option in value.items()} if isinstance(value, Mapping) else {}
        for key, option in (options or {name: value}).items():
            flags += ["--set", f"{key}={option if isinstance(option, str) else json.dumps(option)}"]
    return [*flags, *remaining]


def _literal(text: str) -> Any:
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        return text
