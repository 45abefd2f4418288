"""DeepSpeed's configuration: a dict, or a JSON file with comments. All of it is checked before anything is made.

An unknown key is an error that names the nearest known one; ``names.toml`` says what each known one does.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...cli.config.rules import read_json
from ...distributed import read_ranks
from ...errors import RefusedError, SettingError, nearest
from ..layer import Layer, device_of

layer = Layer("DeepSpeed")
NAMES = tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))


class Key(NamedTuple):
    """A key of the configuration."""

    default: Any  # DeepSpeed's; a list holds all values that ask for nothing
    why: str = ""  # the reason for which other values are ignored or refused; "" where they are honoured
    refused: bool = False  # other values are an error

    def asks(self, value: Any) -> bool:
        """Whether `value` asks for something: it is neither null, "auto", a default, nor a section that is off."""
        if value in (None, "auto", {}, []) or (
            isinstance(value, Mapping) and value.get("enabled") in (False, "auto")
        ):
            return False
        known = self.default if isinstance(self.default, list) else [self.default]
        return (value.lower() if isinstance(value, str) else value) not in known


def _keys(table: Mapping[str, Any], why: str = "", refused: bool = False) -> dict[str, Key]:
    own = {name: value for name, value in table.items() if name != "null" and not isinstance(value, dict)}
    found = {name: Key(value, why, refused) for name, value in own.items()}
    found |= {name: Key(None, why, refused) for name in table.get("null", "").split()}
    for kind in ("ignored", "refused"):
        for reason, inner in table.get(kind, {}).items():
            found |= _keys(inner, reason, kind == "refused")
    return found


KEYS = {section: _keys(table) for section, table in NAMES["keys"].items()}
# Address of a module → its absent names, with the reasons; and addresses of modules that are refused.
ABSENT: dict[str, dict[str, str]] = NAMES["absent"]
ABSENT |= dict.fromkeys(("runtime.zero", "runtime.zero.partition_parameters"), ABSENT["zero"])
ADDRESSES = {at: why for why, addresses in NAMES["addresses"].items() for at in addresses.split()}
REFUSED: dict[str, str] = NAMES["engine"]["refused"]
# Method of the engine → the section and the key that it answers with.
ANSWERS: dict[str, tuple[str, str]] = {
    **{f"zero_{key}": ("zero_optimization", key) for key in KEYS["zero_optimization"]},
    **{f"flops_profiler_{key}": ("flops_profiler", key) for key in KEYS["flops_profiler"]},
}
for _name, _keyed in NAMES["engine"]["answers"].items():
    _section, _dot, _key = _keyed.rpartition(".")
    ANSWERS |= {_name: (_section, _key)} if _dot else {key: (_name, key) for key in _keyed.split()}
ANSWERED_FALSE = frozenset(NAMES["engine"]["off"]["names"].split())

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
BF16 = ("bf16", "bfloat16", "torch.bfloat16")
FP16 = ("fp16", "float16", "torch.float16", "half")
# Bounds of numbers; others are 0 or more.
LEAST = dict.fromkeys((*SIZES, "fp16.loss_scale_window", "fp16.hysteresis"), 1)
MOST = {"zero_optimization.stage": 3, "fp16.initial_scale_power": 127}


NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\s*", re.IGNORECASE)


class Batch(NamedTuple):
    """Samples of one update: ``train = micro × steps × world``."""

    train: int
    micro: int
    steps: int
    world: int


@dataclass(frozen=True)
class Config:
    """The whole configuration."""

    content: Mapping[str, Any]  # the sections and keys as they were given
    batch: Batch
    half: str  # "fp16", "bf16" or ""
    precision: str  # of the Accelerator: "O2" under fp16, whose weights are fp16
    skips: bool  # steps with gradients that are not finite are skipped without a loss scale, too
    offload: bool  # weights and optimizer states are in host memory
    optimizer: tuple[str, dict[str, Any]] | None  # type and parameters
    scheduler: tuple[str, dict[str, Any]] | None
    ignored: dict[str, str]  # keys without effect, with the reason

    def value(self, key: str, section: str = "") -> Any:
        """The value of a key, or DeepSpeed's default."""
        return _value(self.content, key, section)

    @property
    def stage(self) -> int:
        """Of ZeRO, 0 to 3."""
        return int(self.value("stage", "zero_optimization"))

    @property
    def clip(self) -> float:
        """Largest norm of the gradients; 0 for no limit."""
        return float(self.value("gradient_clipping"))

    def scale(self) -> dict[str, Any]:
        """Arguments of `GradScalerKwargs`: DeepSpeed's scale grows one good step later than torch's.

        Without ZeRO each overflow halves it, down to the smallest scale, where training goes on.
        """
        keys = "loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale"
        static, power, window, overflows, refill, least = (self.value(key, "fp16") for key in keys.split())
        if static:
            return {"init_scale": float(static), "dynamic": False}
        return {
            "init_scale": 2.0**power,
            "growth_interval": int(window),
            "hysteresis": int(overflows) if self.stage else 1,
            "refill_each_step": refill and self.stage > 0,
            "min_scale": float(least),
            "growth_delay": 1,
            "raise_at_minimum": self.stage > 0,
        }


def _value(content: Mapping[str, Any], key: str, section: str) -> Any:
    inside: Any = content
    for name in section.split(".") if section else ():
        inside = inside.get(name) or {}
    default, found = (
        KEYS[section][key].default,
        inside.get(key, inside.get(f"stage3_{key}")),
    )  # an older spelling
    return (default[0] if isinstance(default, list) else default) if found in (None, "auto") else found


def read(given: Mapping[str, Any] | str | os.PathLike[str], world: int) -> Config:
    """The configuration `given`, for `world` ranks.

    Raises:
        SettingError: an unknown key or a wrong value.
        RefusedError: a key that asks for something that is not here.
    """
    content: Any = given
    if isinstance(given, (str, os.PathLike)):
        if not Path(given).is_file():
            raise SettingError(f"no DeepSpeed configuration at {os.fspath(given)!r}: pass a path, or a dict")
        content = read_json(Path(given).read_text(encoding="utf-8"), str(given))
    if not isinstance(content, Mapping):
        raise SettingError(f"the configuration is a {type(content).__name__}; it must be a dict, or a path")
    content = {"bf16" if key == "bfloat16" else key: value for key, value in content.items()}
    if isinstance(content.get("zero_optimization"), bool):  # an older spelling
        content["zero_optimization"] = {"stage": int(content["zero_optimization"])}
    if content.get("steps_per_print") == math.inf:
        content["steps_per_print"] = 0
    ignored, batch = _look_through(content), triangle(content, world)
    if str(tag := _value(content, "tag_validation", "checkpoint")).lower() not in ("ignore", "warn", "fail"):
        raise SettingError(f"checkpoint.tag_validation={tag!r} is not one of ignore, warn and fail")
    typed = [_typed(content, name) for name in ("optimizer", "scheduler")]
    return Config(content, batch, *_precision(content), _offloads(content), *typed, ignored)


def _look_through(content: Mapping[str, Any], section: str = "") -> dict[str, str]:
    """The keys of `content` that ask for something and have no effect, with the reasons; checks the others' values."""
    found, known = {}, KEYS[section]
    for name, value in content.items():
        where = f"{section}.{name}" if section else name
        if name not in known:
            whole = section or "a DeepSpeed configuration"
            near = nearest(name, known) or "."
            raise SettingError(f"{whole} has no key {name!r}{near} Known: {', '.join(known)}")
        key = known[name]
        if where in KEYS and value is not None:
            if not isinstance(value, Mapping):
                raise SettingError(f"{where}={value!r} must be a dict of its settings")
            inner = _look_through(value, where)
            found |= inner if value.get("enabled") is not False else {}
        elif not key.why and value is not None:
            _check(where, value, key.default)
        elif key.asks(value):
            if key.refused:
                raise RefusedError(f"{where}={value!r} is not honoured: {key.why}")
            found[where] = key.why
    return found


def _check(name: str, value: Any, default: Any) -> None:
    """A switch or number like DeepSpeed's default; SettingError for another value."""
    if name in SIZES:
        default = None if value == "auto" else 0
    elif value == "auto":
        raise SettingError(f"{name}='auto' is for tools that fill it in: write a value, or leave it out")
    if isinstance(default, bool) and value not in (True, False):
        raise SettingError(f"{name}={value!r} is neither true nor false")
    if isinstance(default, bool) or not isinstance(default, (int, float)):
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise SettingError(f"{name}={value!r} is not a finite number")
    if isinstance(default, int) and value != int(value):
        raise SettingError(f"{name}={value!r} is not an integer")
    least, most = LEAST.get(name, 0), MOST.get(name, math.inf)
    if not least <= value <= most:
        bounds = f"is below {least:g}" if most == math.inf else f"must lie in {least:g} … {most:g}"
        raise SettingError(f"{name}={value!r} {bounds}")


def _precision(content: Mapping[str, Any]) -> tuple[str, str, bool]:
    """`half`, `precision` and `skips` of a `Config`."""
    on = [name for name in ("fp16", "bf16", "torch_autocast") if _value(content, "enabled", name)]
    if len(on) > 1:
        raise SettingError(f"{' and '.join(on)} are enabled at once: turn one of them off")
    if on == ["fp16"]:
        return "fp16", "O2", False
    if on == ["bf16"]:
        stage = _value(content, "stage", "zero_optimization")
        return "bf16", "bf16", not stage or _value(content, "check_grad_overflow", "bf16")
    if on == ["torch_autocast"]:
        usual = torch.get_autocast_dtype(device_of(read_ranks()).type)
        word = str(_value(content, "dtype", "torch_autocast") or usual)
        if word not in (*BF16, *FP16):
            raise SettingError(f"torch_autocast.dtype={word!r} is neither 'bfloat16' nor 'float16'")
        return "", "bf16" if word in BF16 else "fp16", False
    return "", "fp32", False


def _offloads(content: Mapping[str, Any]) -> bool:
    zero = "zero_optimization"
    asked = any(_value(content, f"cpu_offload{more}", zero) in (True,) for more in ("", "_param", "_params"))
    for key in ("offload_optimizer", "offload_param"):
        device = _value(content, "device", f"{zero}.{key}")
        if device == "nvme":
            raise RefusedError(f'{zero}.{key}.device="nvme": nothing is moved to disks; use "cpu"')
        if device not in ("cpu", "none", None):
            raise SettingError(f"{zero}.{key}.device={device!r} is not one of cpu, nvme and none")
        asked |= device == "cpu"
    return asked


def _typed(content: Mapping[str, Any], name: str) -> tuple[str, dict[str, Any]] | None:
    section = content.get(name) or {}
    kind, params = section.get("type"), section.get("params") or {}
    if kind is None:
        return None
    if not isinstance(kind, str) or not isinstance(params, Mapping):
        raise SettingError(f"{name} needs a type by name and params as a dict, not {kind!r} and {params!r}")
    for key, value in params.items():
        _check(f"{name}.params.{key}", value, None)
        if isinstance(value, str) and NUMBER.fullmatch(value):
            raise SettingError(f"{name}.params.{key}={value!r} is a string: write the number without quotes")
    return kind, dict(params)


def triangle(content: Mapping[str, Any], world: int) -> Batch:
    """The three batch sizes from those that are given."""
    train, micro, steps = (_value(content, name, "") for name in SIZES)
    said = ", ".join(f"{name}={value}" for name, value in zip(SIZES, (train, micro, steps)))
    if train is None and micro is None:
        raise SettingError(f"neither {SIZES[0]} nor {SIZES[1]} is given: give at least one of them")
    if train is None:
        train = micro * (steps or 1) * world
    if micro is None:
        micro = train // ((steps or 1) * world)
    steps = steps or max(1, train // max(1, micro * world))
    if train != micro * steps * world:
        raise SettingError(
            f"train_batch_size is not micro-batch × accumulation × ranks: {said}, {world} ranks ({train} != {micro} * {steps} * {world})"
        )
    return Batch(*map(int, (train, micro, steps, world)))
