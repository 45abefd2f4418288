"""DeepSpeed's configuration: a dict, or a JSON file with comments. All of it is checked before anything is made.

An unknown key is an error that names the nearest known one. A known key without effect is ignored with a warning.
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
from ..layer import Layer

layer = Layer("DeepSpeed")

OFF = (None, False, "none", {}, [])
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
PROFILED = ("module_depth", "top_modules", "detailed", "recompute_fwd_factor")  # without effect
FLOPS = ("enabled", "profile_step", "output_file", *PROFILED)
MONITORS = ("tensorboard", "wandb", "csv_monitor")
LOGGED = "log by engine.accelerator: EASYMP_LOG_WITH=tensorboard, wandb or jsonl, and accelerator.log"
PRECISIONS = {
    "": "fp32",
    "fp16": "O2",
    "bf16": "bf16",
}  # section that is enabled -> precision of the Accelerator
# Keys with an effect: whole values, and some keys of a section. Other known keys have none.
_WHOLE = (
    "gradient_clipping optimizer scheduler steps_per_print wall_clock_breakdown dataloader_drop_last flops_profiler "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer data_types"
)
_FP16 = "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale"
HONOURED: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys((*SIZES, *_WHOLE.split())),
    "fp16": tuple(_FP16.split()),
    "bf16": ("enabled",),
    "zero_optimization": ("stage", "offload_optimizer", "offload_param", "cpu_offload"),
    "activation_checkpointing": ("cpu_checkpointing",),
}


@dataclass(frozen=True)
class Batch:
    """Samples of one update: ``train = micro × steps × world``."""

    train: int
    micro: int
    steps: int
    world: int


@dataclass(frozen=True)
class Config:
    """The whole configuration.

    Attributes:
        batch: the batch sizes.
        half: "fp16", "bf16" or "".
        scale: arguments of `GradScalerKwargs`, under fp16.
        stage: of ZeRO, 0 to 3.
        offload: weights and optimizer states are in host memory.
        clip: largest norm of the gradients; 0 for no limit.
        optimizer, scheduler: (type, parameters) or None.
        every: updates between two lines in the log.
        flops: options of the flops profiler, where it is on.
        ignored: keys without effect, with the reason.
    """

    batch: Batch
    half: str = ""
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
    ignored: dict[str, str] = field(default_factory=dict)

    @property
    def precision(self) -> str:
        """Precision of the Accelerator."""
        return PRECISIONS[self.half]


class Section:
    """One section of a configuration (the whole of it without `name`), read with checks."""

    def __init__(self, content: Mapping[str, Any], name: str = "") -> None:
        found = content.get(name) if name else content
        if found is not None and not isinstance(found, Mapping):
            raise SettingError(f"{name}={found!r} must be a dict of its settings")
        self.values, self._prefix = found or {}, f"{name}." if name else ""

    def get(self, key: str, default: Any) -> Any:
        """The value; `default` for null."""
        value = self.values.get(key)
        refuse_auto(f"{self._prefix}{key}", value)
        return default if value is None else value

    def flag(self, key: str) -> bool:
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise SettingError(f"{self._prefix}{key}={value!r} is neither true nor false")
        return value

    def number(self, key: str, default: float, least: float = 0, most: float = math.inf) -> Any:
        """A number of the type of `default`, int or float."""
        value, name = self.get(key, default), f"{self._prefix}{key}"
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise SettingError(f"{name}={value!r} is not a finite number")
        if isinstance(default, int) and value != int(value):
            raise SettingError(f"{name}={value!r} is not an integer")
        if not least <= value <= most:
            bounds = f"is below {least:g}" if most == math.inf else f"must lie in {least:g} … {most:g}"
            raise SettingError(f"{name}={value!r} {bounds}")
        return type(default)(value)


def refuse_auto(name: str, value: Any) -> None:
    """Raise SettingError for the word "auto"."""
    if value == "auto":
        raise SettingError(
            f"{name}='auto' is for tools that fill it in, such as Hugging Face's Trainer: write a value, or leave it out"
        )


def read(given: Mapping[str, Any] | str | os.PathLike[str], world: int) -> Config:
    """The configuration `given`, for `world` ranks."""
    content = _load(given) if isinstance(given, (str, os.PathLike)) else given
    if not isinstance(content, Mapping):
        raise SettingError(
            f"the DeepSpeed configuration is a {type(content).__name__}; it must be a dict or a file with one"
        )
    content = {"bf16" if key == "bfloat16" else key: value for key, value in content.items()}
    if isinstance(content.get("zero_optimization"), bool):  # an older spelling
        content["zero_optimization"] = {"stage": int(content["zero_optimization"])}
    if content.get("steps_per_print") == math.inf:
        content["steps_per_print"] = 0
    _refuse_unknown(content)
    top, zero = Section(content), Section(content, "zero_optimization")
    halves = [name for name in ("fp16", "bf16") if Section(content, name).flag("enabled")]
    if len(halves) > 1:
        raise SettingError("fp16 and bf16 are enabled at once: turn one of them off")
    flops = content.get("flops_profiler")
    return Config(
        batch=triangle(content, world),
        half="".join(halves),
        scale=_loss_scale(Section(content, "fp16")) if halves == ["fp16"] else {},
        stage=zero.number("stage", 0, most=3),
        offload=_offloads(zero),
        clip=top.number("gradient_clipping", 1.0),
        optimizer=_typed(content, "optimizer"),
        scheduler=_typed(content, "scheduler"),
        every=top.number("steps_per_print", 10) or None,
        breakdown=top.flag("wall_clock_breakdown"),
        drop_last=top.flag("dataloader_drop_last"),
        flops=dict(flops) if isinstance(flops, Mapping) and flops.get("enabled") else None,
        ignored=_ignored(content),
    )


def _load(path: str | os.PathLike[str]) -> Any:
    if not Path(path).is_file():
        raise SettingError(
            f"there is no DeepSpeed configuration at {os.fspath(path)!r}: pass a file's path, or a dict"
        )
    return read_json(Path(path).read_text(encoding="utf-8"), str(path))


def _refuse_unknown(content: Mapping[str, Any]) -> None:
    _refuse_others(content, DEEPSPEED, "a DeepSpeed configuration")
    for key, value in content.items():
        known = FLOPS if key == "flops_profiler" else DEEPSPEED[key]
        if isinstance(value, Mapping) and isinstance(known, (tuple, Mapping)):
            _refuse_others(value, known, key)


def _refuse_others(given: Mapping[str, Any], known: Any, where: str) -> None:
    for name in given:
        if name not in known:
            raise SettingError(
                f"{where} has no key {name!r}{nearest(name, known) or '.'} Known: {', '.join(known)}"
            )


def _ignored(content: Mapping[str, Any]) -> dict[str, str]:
    """Known keys that ask for something and have no effect."""
    found = {}
    for key, value in content.items():
        inner = value if isinstance(value, Mapping) else {}
        if key == "flops_profiler" and inner.get("enabled"):
            found |= {f"{key}.{name}": "the whole model is counted" for name in PROFILED if name in inner}
        elif key in HONOURED:
            kept = HONOURED[key]
            names = [
                name for name in inner if kept is not None and name not in kept and inner[name] not in OFF
            ]
            found |= {f"{key}.{name}": "the strategy and torch decide it" for name in names}
        elif value not in OFF and inner.get("enabled") is not False:
            found[key] = LOGGED if key in MONITORS else "easymp has no such part, or does it by itself"
    return found


def _offloads(zero: Section) -> bool:
    asked = zero.values.get("cpu_offload") is True
    for key in ("offload_optimizer", "offload_param"):
        device = Section(zero.values, key).values.get("device")
        if device == "nvme":
            raise SettingError(f'zero_optimization.{key}.device="nvme": nothing is moved to disks; use "cpu"')
        if device not in ("cpu", "none", None):
            raise SettingError(f"zero_optimization.{key}.device={device!r} is not one of cpu, nvme and none")
        asked |= device == "cpu"
    return asked


def _typed(content: Mapping[str, Any], name: str) -> tuple[str, dict[str, Any]] | None:
    section = Section(content, name).values
    kind, params = section.get("type"), section.get("params") or {}
    for key in section:
        if key not in ("type", "params", "legacy_fusion"):
            raise SettingError(f"{name} has no key {key!r}: it has type and params")
    if kind is None:
        return None
    if not isinstance(kind, str) or not isinstance(params, Mapping):
        raise SettingError(f"{name} needs a type by name and params as a dict, not {kind!r} and {params!r}")
    for key, value in params.items():
        refuse_auto(f"{name}.params.{key}", value)
    return kind, dict(params)


def _loss_scale(fp16: Section) -> dict[str, Any]:
    """DeepSpeed's rule as arguments of `GradScalerKwargs`: the scale grows one good step later than torch's."""
    static = fp16.number("loss_scale", 0.0)
    if static:
        return {"init_scale": static, "dynamic": False}
    return {
        "init_scale": 2.0 ** fp16.number("initial_scale_power", 16, most=127),
        "growth_interval": fp16.number("loss_scale_window", 1000, least=1),
        "hysteresis": fp16.number("hysteresis", 2, least=1),
        "refill_each_step": fp16.flag("consecutive_hysteresis"),
        "min_scale": fp16.number("min_loss_scale", 1.0),
        "growth_delay": 1,
        "raise_at_minimum": True,
    }


def triangle(content: Mapping[str, Any], world: int) -> Batch:
    """The three batch sizes from those that are given."""
    given = Section({name: content[name] for name in SIZES if content.get(name) not in (None, "auto")})
    train, micro, steps = (given.number(name, 1, least=1) if name in given.values else None for name in SIZES)
    said = (
        ", ".join(f"{name}={value}" for name, value in zip(SIZES, (train, micro, steps))) + f", {world} ranks"
    )

    def divided(by: int, words: str) -> int:
        if train % by:
            raise SettingError(f"train_batch_size is not a multiple of {words}: {said}")
        return train // by

    if train is None and micro is None:
        raise SettingError(
            f"neither {SIZES[0]} nor {SIZES[1]} is given: DeepSpeed needs at least one of them"
        )
    if train is None:
        steps = steps or 1
        train = micro * steps * world
    elif micro is None:
        steps = steps or 1
        micro = divided(steps * world, "accumulation × ranks")
    elif steps is None:
        steps = divided(micro * world, "micro-batch × ranks")
    if train != micro * steps * world:
        raise SettingError(
            f"train_batch_size is not micro-batch × accumulation × ranks: {said} ({train} != {micro} * {steps} * {world})"
        )
    return Batch(train, micro, steps, world)
