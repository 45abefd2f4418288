"""Configuration files of other libraries, as settings: of ``accelerate config`` (Accelerate 1.15), and of DeepSpeed.

A rule tells the meaning of a key's value here. A text is the sentence to print (sentences.toml and deepspeed_keys.toml
have most of them); a function takes settings and returns the sentence; a mapping holds the rules of a section. Every
key of a file gets its sentence.

Accelerate counts processes over all machines, easymp on each. Half of a DeepSpeed file is about the script, which makes
its own optimizer, scheduler and loader: the sentence is then the line to write.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, Union

from ...base import env
from ...errors import SettingError, nearest
from ...registry import ALIASES, STRATEGIES
from ...settings import LAUNCHING, NAMES, as_table, checked
from ..terminal import missing_packages

STRING = r'("(?:[^"\\\n]|\\.)*")'
COMMENT = re.compile(STRING + r"|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
LAST_COMMA = re.compile(STRING + r"|(?<=[^\s,\[{:])(\s*),(?=\s*[}\]])")
# What a file can hold: a function comes from Python only.
FIELDS = {name: f for name, f in {**NAMES, **LAUNCHING}.items() if not str(f.type).startswith("Function")}
SENTENCES = tomllib.loads(Path(__file__).with_name("sentences.toml").read_text(encoding="utf-8"))
DEVICES = ("MULTI_GPU", "MULTI_XPU", "MULTI_CPU")  # kinds of distributed_type
UNSUPPORTED = ("MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON", "XLA", "TPU")
ENGINES = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config", "MEGATRON_LM": "megatron_lm_config"}
KINDS = ("NO", *DEVICES, *UNSUPPORTED, *ENGINES)
# FSDP1's ways to shard, numbered from 1 to 5.
SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
STAGES = {0: "ddp", 1: "zero1", 2: "fsdp", 3: "fsdp"}  # of ZeRO
OFF = "nothing to take: off"
ONE_PROCESS = "nothing to take: strategy stays auto, for one process has nothing to share"
SCALER = "scaler_options"
Rule = Callable[["ImportedSettings", Any], str]
Rules = Mapping[str, Union[Rule, str, "Rules"]]

# -- documents: YAML, and JSON with comments


class Document(NamedTuple):
    """A file as keys and values."""

    name: str
    content: dict[str, Any]


def read_document(path: str | Path) -> Document:
    """The file at `path`: YAML by its suffix, else JSON if it begins with a brace, comments aside, else YAML."""
    name, path = str(path), Path(path)
    if not path.is_file():
        raise SettingError(f"{name!r} is not a file: pass one of Accelerate (YAML) or of DeepSpeed (JSON)")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{name!r} cannot be read as a text file: {error}") from error
    is_json = _without_comments(text).lstrip().startswith("{") and path.suffix.lower() not in (".yaml", ".yml")
    content = read_json(text, name) if is_json or path.suffix.lower() == ".json" else _read_yaml(text, name)
    if not isinstance(content, dict) or not content:
        raise SettingError(f"{name} holds no keys with values: pass a file of Accelerate or DeepSpeed")
    return Document(name, content)


def read_json(text: str, name: str) -> Any:
    """The value of JSON with comments and trailing commas; errors call the text `name`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_duplicates([key for key, _ in pairs], name)
        return dict(pairs)

    def finite(number: str) -> float:
        if not math.isfinite(float(number)):
            raise SettingError(f"{name}: {number} is not a finite number")
        return float(number)

    with _parsing(name, "JSON"):
        text = _without_comments(text.removeprefix("\ufeff"))
        text = LAST_COMMA.sub(lambda match: match[1] or match[2] + " ", text)
        return json.loads(text, object_pairs_hook=unique, parse_float=finite, parse_constant=finite)


def _without_comments(text: str) -> str:
    """JSON without ``//``, ``#`` and ``/* */``, which become spaces, so that lines keep their numbers."""
    return COMMENT.sub(lambda match: match[1] or re.sub(r"[^\n]", " ", match[0]), text)


def _read_yaml(text: str, name: str) -> Any:
    if sentence := missing_packages("yaml", "yaml"):
        raise SettingError(f"{name} is a YAML file, and {sentence}")
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            _refuse_duplicates([str(key.value) for key, _ in node.value], name)
            return super().construct_mapping(node, deep)

    with _parsing(name, "YAML", yaml.YAMLError):
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):  # a few can mean billions
            raise SettingError(f"{name} has an alias (*), which no configuration needs: write the value")
        return yaml.load(text, Loader)  # a SafeLoader


@contextmanager
def _parsing(name: str, form: str, parser_error: type[Exception] = ValueError) -> Iterator[None]:
    """Turn a parser's errors, also at numbers of thousands of digits and thousands of brackets, into SettingError."""
    try:
        yield
    except SettingError:
        raise
    except (parser_error, ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise SettingError(f"{name}{line} is not valid {form}: {' '.join(str(error).split())}") from error


def _refuse_duplicates(keys: Sequence[str], name: str) -> None:
    for key in keys:
        if keys.count(key) > 1:
            raise SettingError(f"{name}: the key {key!r} stands twice in a section: keep one")


# -- DeepSpeed's keys, for `easymp.compat.deepspeed`, too


class Key(NamedTuple):
    """A key of DeepSpeed's configuration."""

    default: Any  # DeepSpeed's; a list holds all values that ask for nothing
    kind: str  # "honoured", "ignored" or "refused" in scripts of DeepSpeed
    reason: str  # why it is ignored or refused; of an honoured key, what to write for easymp

    def asks(self, value: Any) -> bool:
        """Whether `value` asks for something: it is neither null, "auto", a default, nor a section that is off."""
        if value in (None, "auto", {}, []) or (isinstance(value, Mapping) and value.get("enabled") in (False, "auto")):
            return False
        defaults = self.default if isinstance(self.default, list) else [self.default]
        return (value.lower() if isinstance(value, str) else value) not in defaults


def _read_keys() -> dict[str, dict[str, Key]]:
    tables = tomllib.loads(Path(__file__).with_name("deepspeed_keys.toml").read_text(encoding="utf-8"))
    sections: dict[str, dict[str, Key]] = {}
    for names, reasons_by_kind in tables.items():
        for kind, reasons in reasons_by_kind.items():
            for reason, text in reasons.items():
                for name, equals, default in (entry.partition("=") for entry in text.split()):
                    key = Key(json.loads(default) if equals else None, kind, reason)
                    spellings = [name] if name[0] != "?" else [name[1:], f"stage3_{name[1:]}"]
                    for section in names.split() or [""]:
                        sections.setdefault(section, {}).update(dict.fromkeys(spellings, key))
    return sections


KEYS = _read_keys()  # section → key → what it does


class ImportedSettings:
    """The settings taken from files so far. A `strategy` of None is "auto", which has no options."""

    def __init__(self, document: Document, library: str, strategy: str | None) -> None:
        self.values: dict[str, Any] = {}  # of settings by name, those of `easymp launch` too
        self.lines: list[tuple[str, str]] = []  # a key with its value, and the sentence about it
        self.path: tuple[str, ...] = ()  # of the current key
        self.library = library
        self.begin(document, library, strategy)

    def begin(self, document: Document, library: str, strategy: str | None) -> None:
        """Go on with another file, which the previous one named."""
        self.document, self._format, self.strategy = document, library, strategy

    def walk(self, content: Mapping[str, Any], rules: Rules, path: tuple[str, ...] = ()) -> None:
        """Apply `rules` to each key of `content`, the section of the document at `path`."""
        disabled = "enabled" in rules and content.get("enabled") is not True
        for key, value in content.items():
            self.path = (*path, str(key))
            rule = rules.get(str(key))
            if isinstance(rule, Mapping) and isinstance(value, Mapping) and value:
                self.walk(value, rule, self.path)
                continue
            if rule is None:
                section = f" in {'.'.join(path)}" if path else ""
                hint = nearest(str(key), rules)
                sentence = f"unknown, nothing taken: {self._format} has no {str(key)!r}{section}{hint}"
            elif disabled and key != "enabled":
                sentence = f"nothing to take: {path[-1]} is not enabled"
            else:
                sentence = self._apply(rule, value)
            self.lines.append((f"{'.'.join((*path, str(key)))}: {spelled(value)}", sentence))

    def _apply(self, rule: Rule | str | Rules, value: Any) -> str:
        if is_off(value) and not hasattr(rule, "also_off"):
            return OFF
        if value == "auto":
            return "nothing to take: auto, so the script decides it"
        if isinstance(rule, str):
            return rule.replace("{value}", spelled(value))
        if isinstance(rule, Mapping):
            raise self.wrong(value, "is not a group of keys")
        return rule(self, value)

    def set(self, name: str, value: Any) -> str:
        value = checked(FIELDS[name], value, f"{self.document.name}: {self.address} = ")
        if self.values.setdefault(name, value) != value:
            raise SettingError(
                f"{self.document.name}: {self.address} would be {name} = {json.dumps(value)}, but another line has "
                f"{json.dumps(self.values[name])}: remove one of the two"
            )
        return f"{'[launch] ' * (name in LAUNCHING)}{name} = {json.dumps(value)}"

    def option(self, **options: Any) -> str:
        if self.strategy is None:
            return "nothing to take: strategy stays auto, which has no options"
        if unknown := options.keys() - {f.name for f in fields(STRATEGIES[self.strategy].Options)}:
            return f"no counterpart: strategy {self.strategy} has no option {min(unknown)}"
        return self.table("strategy_options", **options)

    def table(self, name: str, **options: Any) -> str:
        record = {**as_table(self.values.get(name)), **options}
        self.values[name] = record["what"] if record.keys() == {"what"} else record  # `compile` is one word then
        return f"[{name}] " + ", ".join(f"{k} = {json.dumps(v)}" for k, v in options.items())

    def number(self, value: Any, lowest: float = 0, highest: float = math.inf, integer: bool = False) -> Any:
        """`value`, if it is such a number. YAML reads 1e8 as a text."""
        try:
            value = float(value) if isinstance(value, str) else value
        except ValueError:
            raise self.wrong(value, "is not a number") from None
        if integer and isinstance(value, float) and value.is_integer():
            value = int(value)
        is_number = isinstance(value, int if integer else (int, float)) and not isinstance(value, bool)
        if not (is_number and lowest <= value <= highest and value < math.inf):
            bounds = f"of at least {lowest:g}" if highest == math.inf else f"from {lowest:g} to {highest:g}"
            raise self.wrong(value, f"is not {'an integer' if integer else 'a number'} {bounds}")
        return value

    def boolean(self, value: Any) -> bool:
        if str(value).lower() not in env.TRUE | env.FALSE:
            raise self.wrong(value, "is neither yes nor no")
        return str(value).lower() in env.TRUE

    def wrong(self, value: Any, problem: str) -> SettingError:
        return SettingError(f"{self.document.name}: {self.address} = {spelled(value)} {problem}")

    @property
    def address(self) -> str:
        """The current key with its sections: ``"zero_optimization.stage"``."""
        return ".".join(self.path)


def also_off(rule: Rule) -> Rule:
    """Mark a rule that is also asked about values that mean "off"."""
    rule.also_off = True  # type: ignore[attr-defined]
    return rule


def is_off(value: Any) -> bool:
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    return value == [] or value is None or str(value).lower() in env.FALSE | {"none"}


def switch(name: str, on: Any = True) -> Rule:
    """A rule for yes or no: yes sets `name`."""
    return lambda settings, value: settings.set(name, on) if settings.boolean(value) else OFF


accumulate = also_off(lambda settings, value: settings.set("gradient_accumulation_steps", value))


def spelled(value: Any) -> str:
    """A value on one line of at most 60 characters."""
    text = json.dumps(value, default=str) if isinstance(value, (dict, list, bool, type(None))) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


# -- files


def import_document(document: Document, folder: Path) -> ImportedSettings:
    """The settings of a file of DeepSpeed, or of one that ``accelerate config`` wrote.

    A file of DeepSpeed that the latter names is in the working directory or in `folder`.
    """
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
    """The upper-case name of FSDP1's sharding strategy, given by name or number."""
    name = str(value).upper()
    return dict(zip("12345", SHARDING)).get(name, name)


def _zero_strategy(content: Mapping[str, Any]) -> str | None:
    """The strategy that the file asks for; None where "auto" does it, which is ddp on several processes."""
    size = _section(content, "tensor_parallel").get("autotp_size")
    if isinstance(size, int) and size > 1:
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


# -- rules that look at the value of DeepSpeed's keys


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


# -- rules that look at the value of Accelerate's keys


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


# Rules of keys and of sections; sentences.toml has the keys without an effect.
ACCELERATE: dict[str, Rule | str | Rules] = {
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


for text, keys in SENTENCES["accelerate"].items():
    if isinstance(keys, str):
        ACCELERATE |= dict.fromkeys(keys.split(), text)
    else:  # a section
        sentences = {key: sentence for sentence, names in keys.items() for key in names.split()}
        ACCELERATE[text] = {**sentences, **ACCELERATE.get(text, {})}  # type: ignore[dict-item]
