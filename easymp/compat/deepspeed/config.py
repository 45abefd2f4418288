"""DeepSpeed's configuration: a dict, or a JSON file with comments. `KEYS` has the effect of each known key."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...cli.config.foreign import KEYS, read_json
from ...distributed import read_ranks
from ...errors import RefusedError, SettingError, nearest
from ..layer import Layer

layer = Layer("DeepSpeed", "deepspeed", "deepspeed")
Content = Mapping[str, Any] | str | os.PathLike[str]  # a configuration, or its path

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Bounds of numbers; others are 0 or more.
MINIMA = dict.fromkeys((*SIZES, "fp16.loss_scale_window", "fp16.hysteresis"), 1)
MAXIMA = {"zero_optimization.stage": 3, "fp16.initial_scale_power": 127}
QUOTED_NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\s*", re.IGNORECASE)


class DeepSpeedConfig:
    """A configuration that has been checked; `mpu` and `mesh_device` have no effect."""

    def __init__(self, config: Content, mpu: Any = None, mesh_device: Any = None) -> None:
        self.content = content = read_content(config)
        if isinstance(content.get("zero_optimization"), bool):  # an older spelling
            content["zero_optimization"] = {"stage": int(content["zero_optimization"])}
        if content.get("steps_per_print") == math.inf:
            content["steps_per_print"] = 0
        self.ignored = check_keys(content)  # keys without effect, with the reasons
        self.world_size = read_ranks().size
        self._read_sizes()
        self.steps_per_print = int(self.value("steps_per_print"))
        self.gradient_clipping = float(self.value("gradient_clipping"))
        self.zero_optimization_stage = int(self.value("stage", "zero_optimization"))
        self.zero_enabled = self.zero_optimization = self.zero_optimization_stage > 0
        self.zero_optimization_partition_gradients = self.zero_optimization_stage >= 2
        self.zero_cpu_offload = self._offloads()
        self.loss_scale = self.value("loss_scale", "fp16")
        self.dynamic_loss_scale = self.loss_scale == 0
        self.initial_dynamic_scale = 2.0 ** self.value("initial_scale_power", "fp16")
        self.dataloader_drop_last = bool(self.value("dataloader_drop_last"))
        self.optimizer_name, self.optimizer_params = self._named_section("optimizer")
        self.scheduler_name, self.scheduler_params = self._named_section("scheduler")
        self.fp16_enabled, self.bf16_enabled = (bool(self.value("enabled", name)) for name in ("fp16", "bf16"))
        if self.fp16_enabled and self.bf16_enabled:
            raise SettingError("fp16 and bf16 are enabled at once: turn one of them off")
        self.bfloat16_enabled = self.bf16_enabled
        checks_overflow = not self.zero_enabled or self.value("check_grad_overflow", "bf16")
        self.skips_nonfinite = self.bf16_enabled and checks_overflow  # without a loss scale, too
        self.precision = "O2" if self.fp16_enabled else "bf16" if self.bf16_enabled else "fp32"

    def value(self, key: str, section: str = "") -> Any:
        """The value of a key, or DeepSpeed's default."""
        values: Any = self.content
        for name in section.split(".") if section else ():
            values = values.get(name) or {}
        value = values.get(key)
        return KEYS[section][key].default if value in (None, "auto") else value

    def _read_sizes(self) -> None:
        """Set samples of an update, those of a micro-batch, and micro-batches of an update, from those given."""
        train, micro, steps = sizes = [self.value(name) for name in SIZES]
        world = self.world_size
        if train is None and micro is None:
            raise SettingError(f"neither {SIZES[0]} nor {SIZES[1]} is given: give at least one of them")
        if train is None:
            train = micro * (steps or 1) * world
        if micro is None:
            micro = train // ((steps or 1) * world)
        steps = steps or max(1, train // max(1, micro * world))
        if train != micro * steps * world:
            numbers = [*(f"{name}={size}" for name, size in zip(SIZES, sizes)), f"{world} ranks"]
            raise SettingError(
                f"train_batch_size is not micro-batch × accumulation × ranks: {', '.join(numbers)} "
                f"({train} != {micro} * {steps} * {world})"
            )
        self.train_batch_size, self.train_micro_batch_size_per_gpu = int(train), int(micro)
        self.gradient_accumulation_steps = int(steps)

    def _offloads(self) -> bool:
        """Whether the optimizer or parameters are to be kept in host memory."""
        section = "zero_optimization"
        offloads = any(self.value(name, section) is True for name in ("cpu_offload", "cpu_offload_param"))
        for key in ("offload_optimizer", "offload_param"):
            device = self.value("device", f"{section}.{key}")
            if device == "nvme":
                raise RefusedError(f'{section}.{key}.device="nvme": nothing is moved to disks; use "cpu"')
            if device not in ("cpu", "none", None):
                raise SettingError(f"{section}.{key}.device={device!r} is not one of cpu, nvme and none")
            offloads |= device == "cpu"
        return offloads

    def _named_section(self, name: str) -> tuple[str | None, dict[str, Any]]:
        """Type and parameters of the optimizer or scheduler."""
        section = self.content.get(name) or {}
        kind, params = section.get("type"), section.get("params") or {}
        if not isinstance(kind, str | None) or not isinstance(params, Mapping):
            raise SettingError(f"{name} needs a type by name and params as a dict, not {kind!r} and {params!r}")
        for key, value in params.items():
            _check_value(f"{name}.params.{key}", value, None)
            if isinstance(value, str) and QUOTED_NUMBER.fullmatch(value):
                raise SettingError(f"{name}.params.{key}={value!r} is a string: write the number without quotes")
        return kind, dict(params)

    def scaler_options(self) -> dict[str, Any]:
        """Arguments of `GradScalerKwargs`; without ZeRO each overflow halves the scale, and none ends the run."""
        if not self.dynamic_loss_scale:
            return {"init_scale": float(self.loss_scale), "dynamic": False}
        return {
            "init_scale": self.initial_dynamic_scale,
            "growth_interval": int(self.value("loss_scale_window", "fp16")),
            "hysteresis": int(self.value("hysteresis", "fp16")) if self.zero_enabled else 1,
            "refill_each_step": self.value("consecutive_hysteresis", "fp16") and self.zero_enabled,
            "min_scale": float(self.value("min_loss_scale", "fp16")),
            "growth_delay": 1,  # one good step later than torch's
            "raise_at_minimum": self.zero_enabled,
        }


def read_content(config: Content) -> dict[str, Any]:
    """The keys of a configuration, with today's name of bf16."""
    content: Any = config
    if isinstance(config, (str, os.PathLike)):
        if not Path(config).is_file():
            raise SettingError(f"no DeepSpeed configuration at {os.fspath(config)!r}: pass a path, or a dict")
        content = read_json(Path(config).read_text(encoding="utf-8"), str(config))
    if not isinstance(content, Mapping):
        raise SettingError(f"the configuration is a {type(content).__name__}; it must be a dict, or a path")
    return {"bf16" if key == "bfloat16" else key: value for key, value in content.items()}


def check_keys(content: Mapping[str, Any], section: str = "") -> dict[str, str]:
    """Check keys and values; returns the keys that ask for something and have no effect, with the reasons."""
    ignored, keys = {}, KEYS[section]
    for name, value in content.items():
        path = f"{section}.{name}" if section else name
        if name not in keys:
            owner = section or "a DeepSpeed configuration"
            raise SettingError(f"{owner} has no key {name!r}{nearest(name, keys) or '.'} Known: {', '.join(keys)}")
        key = keys[name]
        if path in KEYS and value is not None:
            if not isinstance(value, Mapping):
                raise SettingError(f"{path}={value!r} must be a dict of its settings")
            inner_ignored = check_keys(value, path)
            ignored.update(inner_ignored if value.get("enabled") is not False else {})
        elif key.kind == "honoured" and value is not None:
            _check_value(path, value, key.default)
        elif key.asks(value):
            if key.kind == "refused":
                raise RefusedError(f"{path}={value!r} is not honoured: {key.reason}")
            ignored[path] = key.reason
    return ignored


def _check_value(path: str, value: Any, default: Any) -> None:
    """Raise SettingError for a value that is not a switch or number like DeepSpeed's default."""
    if path in SIZES:
        default = None if value == "auto" else 0
    elif value == "auto":
        raise SettingError(f"{path}='auto' is for tools that fill it in: write a value, or leave it out")
    if isinstance(default, bool) and value not in (True, False):
        raise SettingError(f"{path}={value!r} is neither true nor false")
    if isinstance(default, bool) or not isinstance(default, (int, float)):
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise SettingError(f"{path}={value!r} is not a finite number")
    if isinstance(default, int) and value != int(value):
        raise SettingError(f"{path}={value!r} is not an integer")
    minimum, maximum = MINIMA.get(path, 0), MAXIMA.get(path, math.inf)
    if not minimum <= value <= maximum:
        bounds = f"is below {minimum:g}" if maximum == math.inf else f"must lie in {minimum:g} … {maximum:g}"
        raise SettingError(f"{path}={value!r} {bounds}")
