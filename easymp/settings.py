"""What was asked, by argument, environment or project file: each setting said once.

A field of `Settings` and its metadata give the argument's name, the environment's (``EASYMP_`` and the name in capitals), the
key in ``easymp.toml``, the allowed values, and the words of help. `resolve` reads them in that order of precedence.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import env
from .errors import SettingError, nearest
from .protocols import Source

FILE = "easymp.toml"
Size = int  # bytes; said as a number or in words: 16e9, "16GiB", "500 MB"
UNITS = {f"{letter}{i}b".lower(): base**n for n, letter in enumerate(("", *"kmgt")) for i, base in (("", 1000), ("i", 1024))}


def setting(default: Any, help: str, choices: tuple[str, ...] = (), least: float | None = None, most: float | None = None) -> Any:
    """A field of `Settings`: default, one sentence of help, allowed words, smallest and largest number."""
    return field(default=default, metadata={"help": help, "choices": choices, "least": least, "most": most})


@dataclass(frozen=True)
class Settings:
    """Everything a user can set from outside the script. Values that were not asked for keep their defaults."""

    mixed_precision: str = setting(
        "auto",
        "what matrix products run in; auto decides by the hardware",
        ("auto", "no", "fp32", "tf32", "bf16", "fp16", "fp8", "O0", "O1", "O2", "O3", "float32", "bfloat16", "float16", "half"),
    )
    strategy: str = setting(
        "auto",
        "how the model is spread over the processes",
        ("auto", "single", "data_parallel", "ddp", "zero1", "fsdp", "hsdp", "tensor_parallel", "pipeline", "local_sgd"),
    )
    gradient_accumulation_steps: int = setting(1, "micro-batches in one optimizer update", least=1)
    cpu: bool = setting(False, "train on the CPU even where there is an accelerator")
    fused: bool = setting(True, "let plain torch optimizers run their fused step where torch has one for the device")
    ema_decay: float | None = setting(
        None,
        "keep an exponential moving average of the weights, of which each step keeps so much; 0.999 is usual",
        least=0,
        most=0.999999999,
    )
    probe: bool = setting(True, "time fp32 and bf16 in the first training step where no rule is certain; off: the rule alone")
    convert_sync_batchnorm: bool = setting(False, "batch-norm in training by the samples of all processes")
    seed: int | None = setting(None, "seed of all random streams", least=0, most=2**64 - 1)
    deterministic: bool = setting(False, "deterministic algorithms only; nothing is measured")
    timeout: float = setting(120.0, "seconds that a rank waits for the others in a collective", least=0.001, most=1e9)
    memory: Size | None = setting(None, "what a rank has, such as 16GiB, where auto decides by it; else what its device has")
    debug: bool = setting(False, "compare shapes over the ranks before each collective")
    sources: Mapping[str, tuple[Source, str]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for f in NAMES.values():
            object.__setattr__(self, f.name, _checked(f, getattr(self, f.name), f"{f.name}="))

    def source(self, name: str) -> tuple[Source, str]:
        """Where the value comes from, and the words for it, such as ``"EASYMP_SEED in the environment"``."""
        if name in self.sources:
            return self.sources[name]
        if getattr(self, name) != NAMES[name].default:
            return Source.ASKED, "asked for"
        return Source.DEFAULT, "default"


NAMES: dict[str, dataclasses.Field[Any]] = {f.name: f for f in dataclasses.fields(Settings) if f.name != "sources"}


def resolve(given: Settings | None = None, **arguments: Any) -> Settings:
    """The settings in force: arguments first, then `given`, the environment, the project file, and defaults.

    Args:
        given: a whole Settings object; what differs from the defaults counts as asked for.
        arguments: single settings; None means not given.

    Raises:
        SettingError: a wrong name or value, anywhere; the nearest right one is named.
    """
    values: dict[str, Any] = {}
    sources: dict[str, tuple[Source, str]] = {}

    def take(name: str, value: Any, source: Source, words: str) -> None:
        values[name], sources[name] = value, (source, words)

    for name, (value, words) in _from_file().items():
        take(name, value, Source.CONFIG, words)
    for name, (value, words) in _from_environment().items():
        take(name, value, Source.ENVIRONMENT, words)
    for name in NAMES if given is not None else ():
        source, words = given.source(name)
        if source is not Source.DEFAULT:
            take(name, getattr(given, name), source, words)
    for name, value in arguments.items():
        if name not in NAMES:
            raise SettingError(f"{name!r} is no setting{nearest(name, NAMES) or '.'} Known: {', '.join(NAMES)}")
        if value is not None:
            take(name, value, Source.ASKED, f"{name}={value!r}")
    return Settings(**values, sources=sources)


def _checked(f: dataclasses.Field[Any], value: Any, where: str) -> Any:
    """`value` in the field's own type, or a SettingError that begins with `where`."""
    kind = str(f.type).split(" ")[0]
    choices, least, most = f.metadata["choices"], f.metadata["least"], f.metadata["most"]
    if value is None and f.default is None:
        return None
    if kind == "bool":
        if isinstance(value, str) and value.lower() in env.TRUE | env.FALSE:
            return value.lower() in env.TRUE
        if isinstance(value, bool):
            return value
        raise SettingError(f"{where}{value!r} is neither yes nor no: use true or false")
    if kind == "Size":
        return read_bytes(value, where)
    if kind in ("int", "float"):
        number = {"int": int, "float": float}[kind]
        try:
            if isinstance(value, bool) or (kind == "int" and float(value) != int(float(value))):
                raise ValueError
            value = number(value)
            if value != value:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise SettingError(f"{where}{value!r} is not a {'whole ' if kind == 'int' else ''}number") from None
        if least is not None and not value >= least:
            raise SettingError(f"{where}{value!r} is below the smallest possible value, {least:g}")
        if most is not None and value > most:
            raise SettingError(f"{where}{value!r} is above the largest possible value, {most:g}")
        return value
    if not isinstance(value, str):
        raise SettingError(f"{where}{value!r} is a {type(value).__name__}, but a word is needed: one of {', '.join(choices)}")
    words = {choice.lower(): choice for choice in choices}
    if value.lower() not in words:
        raise SettingError(f"{where}{value!r} is not one of {', '.join(choices)}{nearest(value, choices)}")
    return words[value.lower()]


def read_bytes(value: Any, where: str) -> int:
    """A size as a number or in words; `where` begins the message of the error that says it is none."""
    found = None if isinstance(value, bool) else re.fullmatch(r"\s*([0-9.]+(?:e\+?[0-9]+)?)\s*([a-z]*)\s*", str(value).lower())
    try:
        number = int(float(found[1]) * UNITS[found[2] or "b"]) if found else 0
    except (KeyError, ValueError, OverflowError):
        number = 0
    if number < 1:
        raise SettingError(f"{where}{value!r} is no size: use a number of bytes, or one with a unit, such as 16GiB or 16GB")
    return number


def _from_environment() -> dict[str, tuple[Any, str]]:
    known = {env.PREFIX + name.upper(): name for name in NAMES}
    ours = {env.PREFIX + word for word in ("CONFIG", "LOG_LEVEL")} | set(known)
    found = {}
    for variable in env.names(env.PREFIX):
        if variable not in ours:
            raise SettingError(
                f"{variable} in the environment is no setting{nearest(variable, ours) or '.'} Unset it or correct its name"
            )
        if variable in known and env.read(variable):  # an empty variable is the shell's way to unset one
            name, words = known[variable], f"{variable} in the environment"
            found[name] = (_checked(NAMES[name], env.read(variable), f"{variable}="), words)
    return found


def _from_file() -> dict[str, tuple[Any, str]]:
    named = env.read(env.PREFIX + "CONFIG")
    path = Path(named or FILE)
    if not path.is_file():
        if named:
            raise SettingError(f"EASYMP_CONFIG={named!r} in the environment names no file: correct the path or unset it")
        return {}
    import tomllib  # not needed by most runs, and not free

    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{path} is not valid TOML: {error}") from error
    found = {}
    for key, value in content.items():
        if key not in NAMES:
            raise SettingError(f"{path}: {key!r} is no setting{nearest(key, NAMES) or '.'} Known: {', '.join(NAMES)}")
        found[key] = (_checked(NAMES[key], value, f"{path}: {key} = "), str(path))
    return found
