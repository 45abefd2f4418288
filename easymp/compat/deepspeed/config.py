"""DeepSpeed's configuration: a dict, or a file with comments; checked whole before anything is made.

An unknown key is an error that names the nearest known one. A known key that makes no difference here is ignored, and the layer says so.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...cli.config.deepspeed import DEEPSPEED
from ...cli.config.rules import read_json
from ...errors import SettingError, nearest

OFF = (None, False, "none", {}, [])
# Keys that this layer honours, as a whole or these keys of a section. Other known keys have no effect.
_WHOLE = (
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping optimizer scheduler steps_per_print "
    "wall_clock_breakdown dataloader_drop_last flops_profiler zero_allow_untested_optimizer zero_force_ds_cpu_optimizer data_types"
)
_FP16 = "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale"
HONOURED: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys(_WHOLE.split()),
    "fp16": tuple(_FP16.split()),
    "bf16": ("enabled",),
    "zero_optimization": ("stage", "offload_optimizer", "offload_param", "cpu_offload"),
    "activation_checkpointing": ("cpu_checkpointing",),
}
OLD = {"bfloat16": "bf16"}
MONITORS = ("tensorboard", "wandb", "csv_monitor")
LOGGED = "log by engine.accelerator: EASYMP_LOG_WITH=tensorboard, wandb or jsonl, and accelerator.log"
PROFILED = ("module_depth", "top_modules", "detailed", "recompute_fwd_factor")  # without effect
FLOPS = ("enabled", "profile_step", "output_file", *PROFILED)


@dataclass(frozen=True)
class Half:
    """The precision that a section of the configuration asks for.

    Attributes:
        precision: easymp's name.
        scaled: whether the loss is scaled.
        low: whether it is a half precision.
    """

    precision: str
    scaled: bool = False
    low: bool = True


FULL = Half("fp32", low=False)
HALVES = {"fp16": Half("O2", scaled=True), "bf16": Half("bf16")}


@dataclass(frozen=True)
class Batch:
    """Samples an update: ``train = micro × steps × world``."""

    train: int
    micro: int
    steps: int
    world: int


@dataclass(frozen=True)
class Config:
    """The whole configuration.

    Attributes:
        batch: the triangle, solved.
        half: the enabled precision, or `FULL`.
        scale: arguments of `GradScalerKwargs`, under fp16.
        stage: of ZeRO, 0 to 3.
        offload: weights and states lie in the host's memory.
        clip: of the gradients' norm; 0 for none.
        optimizer, scheduler: (type, parameters) or None.
        every: updates between two lines in the log.
        flops: options of the flops profiler, where it is on.
        cpu_checkpointing: inputs of recomputed parts lie in the host's memory.
        ignored: keys without effect, with the reason.
    """

    batch: Batch
    half: Half = FULL
    scale: dict[str, Any] = field(default_factory=dict)
    stage: int = 0
    offload: bool = False
    clip: float = 1.0
    optimizer: tuple[str, dict[str, Any]] | None = None
    scheduler: tuple[str, dict[str, Any]] | None = None
    every: int | None = 10
    breakdown: bool = False
    drop_last: bool = False
    flops: dict[str, Any] | None = None
    cpu_checkpointing: bool = False
    ignored: dict[str, str] = field(default_factory=dict)


def read(given: Mapping[str, Any] | str | os.PathLike[str], world: int) -> Config:
    """The configuration `given`, for `world` ranks.

    Raises:
        SettingError: a file that is not there or not JSON, an unknown key, a wrong value, or batch sizes that contradict one another.
    """
    content = _file(given) if isinstance(given, (str, os.PathLike)) else given
    if not isinstance(content, Mapping):
        raise SettingError(
            f"the DeepSpeed configuration is a {type(content).__name__}, and must be a dict, or a file with one"
        )
    content = {OLD.get(key, key): value for key, value in content.items()}
    if isinstance(content.get("zero_optimization"), bool):  # as it was once written
        content["zero_optimization"] = {"stage": int(content["zero_optimization"])}
    if content.get("steps_per_print") == math.inf:
        content["steps_per_print"] = 0
    _refuse_unknown(content)
    zero = _section(content, "zero_optimization")
    on = [name for name in HALVES if _flag(_section(content, name), f"{name}.enabled", "enabled")]
    half = HALVES[on[0]] if on else FULL
    if len(on) > 1:
        raise SettingError("fp16 and bf16 are enabled at once: turn one of them off")
    flops = content.get("flops_profiler")
    return Config(
        batch=triangle(content, world),
        half=half,
        scale=loss_scale(_section(content, on[0])) if half.scaled else {},
        stage=_number(zero, "zero_optimization.stage", "stage", 0, whole=True, most=3),
        offload=_offloads(zero),
        clip=_number(content, "gradient_clipping", "gradient_clipping", 1.0),
        optimizer=_typed(content, "optimizer"),
        scheduler=_typed(content, "scheduler"),
        every=_number(content, "steps_per_print", "steps_per_print", 10, whole=True) or None,
        breakdown=_flag(content, "wall_clock_breakdown", "wall_clock_breakdown"),
        drop_last=_flag(content, "dataloader_drop_last", "dataloader_drop_last"),
        flops=dict(flops) if isinstance(flops, Mapping) and flops.get("enabled") else None,
        cpu_checkpointing=_flag(
            _section(content, "activation_checkpointing"),
            "activation_checkpointing.cpu_checkpointing",
            "cpu_checkpointing",
        ),
        ignored=_ignored(content),
    )


def _file(path: str | os.PathLike[str]) -> Any:
    place = Path(path)
    if not place.is_file():
        raise SettingError(
            f"the DeepSpeed configuration {os.fspath(path)!r} is no file: pass a path, or a dict"
        )
    return read_json(place.read_text(encoding="utf-8"), str(path))


def _refuse_unknown(content: Mapping[str, Any]) -> None:
    for key, value in content.items():
        if key not in DEEPSPEED:
            raise SettingError(
                f"{key!r} is no key of a DeepSpeed configuration{nearest(key, DEEPSPEED) or '.'} Known: {', '.join(DEEPSPEED)}"
            )
        inner = DEEPSPEED[key]
        known = FLOPS if key == "flops_profiler" else tuple(inner) if isinstance(inner, Mapping) else None
        for name in value if isinstance(value, Mapping) and known is not None else ():
            if name not in known:
                raise SettingError(
                    f"{name!r} is no key of {key}{nearest(name, known) or '.'} Known: {', '.join(known)}"
                )


def _ignored(content: Mapping[str, Any]) -> dict[str, str]:
    """Known keys with a value that asks for something, and no effect."""
    found = {}
    for key, value in content.items():
        inner = value if isinstance(value, Mapping) else {}
        if key == "flops_profiler" and inner.get("enabled"):
            found.update(
                {f"{key}.{name}": "the whole model is counted" for name in PROFILED if name in inner}
            )
        elif key in HONOURED:
            kept = HONOURED[key]
            names = [n for n in inner if kept is not None and n not in kept and inner[n] not in OFF]
            found.update({f"{key}.{name}": "the strategy and torch decide it" for name in names})
        elif value not in OFF and inner.get("enabled") is not False:
            found[key] = LOGGED if key in MONITORS else "easymp has no such part, or does it by itself"
    return found


# -- values -----------------------------------------------------------------------------------------------------------------


def _section(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = content.get(name)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise SettingError(f"{name}={found!r} must be a dict of its settings")
    return found


def _flag(section: Mapping[str, Any], name: str, key: str) -> bool:
    value = section.get(key, False)
    if value is None:
        return False
    _refuse_auto(name, value)
    if value not in (True, False) or not isinstance(value, bool):
        raise SettingError(f"{name}={value!r} is neither true nor false")
    return value


def _refuse_auto(name: str, value: Any) -> None:
    if value == "auto":
        raise SettingError(
            f"{name}='auto' is for tools that fill it in, such as Hugging Face's Trainer: write a value, or leave it out"
        )


def _number(
    section: Mapping[str, Any],
    name: str,
    key: str,
    default: float,
    least: float = 0,
    most: float = math.inf,
    whole: bool = False,
) -> Any:
    value = section.get(key, default)
    if value is None:
        return default
    _refuse_auto(name, value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise SettingError(f"{name}={value!r} is no finite number")
    if whole and value != int(value):
        raise SettingError(f"{name}={value!r} is no whole number")
    if not least <= value <= most:
        raise SettingError(
            f"{name}={value!r} must lie in {least:g} … {most:g}"
            if most < math.inf
            else f"{name}={value!r} is below {least:g}"
        )
    return int(value) if whole else float(value)


def _offloads(zero: Mapping[str, Any]) -> bool:
    asked = zero.get("cpu_offload") is True
    for key in ("offload_optimizer", "offload_param"):
        device = _section(zero, key).get("device", "none")
        if device == "nvme":
            raise SettingError(
                f'zero_optimization.{key}.device="nvme" cannot be honoured: nothing is moved to disks; use "cpu"'
            )
        if device not in ("cpu", "none", None):
            raise SettingError(f"zero_optimization.{key}.device={device!r} is none of cpu, nvme and none")
        asked |= device == "cpu"
    return asked


def _typed(content: Mapping[str, Any], name: str) -> tuple[str, dict[str, Any]] | None:
    section = _section(content, name)
    if not section:
        return None
    kind, params = section.get("type"), section.get("params") or {}
    unknown = [key for key in section if key not in ("type", "params", "legacy_fusion")]
    if unknown:
        raise SettingError(f"{unknown[0]!r} is no key of {name}: it has type and params")
    if kind is None:
        return None
    if not isinstance(kind, str) or not isinstance(params, Mapping):
        raise SettingError(f"{name} needs a type by name and params as a dict, not {kind!r} and {params!r}")
    for key, value in params.items():
        _refuse_auto(f"{name}.params.{key}", value)
    return kind, dict(params)


def loss_scale(fp16: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's rule, as arguments of `GradScalerKwargs`: the scale grows a good step later than torch's."""
    static = _number(fp16, "fp16.loss_scale", "loss_scale", 0.0)
    if static:
        return {"init_scale": static, "dynamic": False}
    return {
        "init_scale": 2.0
        ** _number(fp16, "fp16.initial_scale_power", "initial_scale_power", 16, whole=True, most=127),
        "growth_interval": _number(
            fp16, "fp16.loss_scale_window", "loss_scale_window", 1000, least=1, whole=True
        ),
        "hysteresis": _number(fp16, "fp16.hysteresis", "hysteresis", 2, least=1, whole=True),
        "refill_each_step": _flag(fp16, "fp16.consecutive_hysteresis", "consecutive_hysteresis"),
        "min_scale": _number(fp16, "fp16.min_loss_scale", "min_loss_scale", 1.0),
        "growth_delay": 1,
        "raise_at_minimum": True,
    }


def triangle(content: Mapping[str, Any], world: int) -> Batch:
    """The three batch sizes by those that are given.

    Raises:
        SettingError: none is given, they do not divide, or they contradict one another; with the four numbers.
    """
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    train, micro, steps = (
        None if content.get(name) in (None, "auto") else _number(content, name, name, 1, least=1, whole=True)
        for name in names
    )
    if train is None and micro is None:
        raise SettingError(
            "neither train_batch_size nor train_micro_batch_size_per_gpu is given: DeepSpeed needs at least one of them"
        )
    given = f"train_batch_size={train}, train_micro_batch_size_per_gpu={micro}, gradient_accumulation_steps={steps}, {world} ranks"
    if train is None:
        steps = steps or 1
        return Batch(micro * steps * world, micro, steps, world)
    if micro is None:
        steps = steps or 1
        if train % (steps * world):
            raise SettingError(f"train_batch_size is no multiple of accumulation × ranks: {given}")
        return Batch(train, train // (steps * world), steps, world)
    if steps is None:
        if train % (micro * world):
            raise SettingError(f"train_batch_size is no multiple of micro-batch × ranks: {given}")
        steps = train // (micro * world)
    if train != micro * steps * world:
        raise SettingError(
            f"train_batch_size is not micro-batch × accumulation × ranks: {given} ({train} != {micro} * {steps} * {world})"
        )
    return Batch(train, micro, steps, world)
