"""Settings from argument, environment or project file. Each is defined once.

A field of `Settings` and its metadata give the argument, the environment variable (``EASYMP_`` and the name in
capitals), the key in ``easymp.toml``, the word after ``--set``, the allowed values, the question of `easymp config`,
and the help. `Launching` is the same for `easymp launch`: its flags, and the table ``[launch]`` of the file.

A table of options is written as ``[strategy_options]`` in the file and as ``{cpu_offload = true}`` (TOML) or
``{"cpu_offload": true}`` (JSON) in a variable. It replaces the table of a lower source; ``--set
strategy_options.cpu_offload=true`` changes one option of it.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from .base import env
from .base.units import read_bytes
from .errors import SettingError, nearest
from .options import AutocastKwargs, DataLoaderConfiguration, GradScalerKwargs, refuse_retired
from .options import option as setting
from .protocols import Source
from .registry import ALIASES, PRECISIONS, STRATEGIES, PrecisionName, StrategyName

# -- The project file, and what tomllib lacks for it: lines of keys, and single values

FILE = "easymp.toml"
VARIABLE = env.PREFIX + "CONFIG"  # names another one
LAUNCH = "launch"  # the table of `easymp launch`
T = TypeVar("T")
STATEMENT = re.compile(r"""\s*(?:\[+([^\]]+)\]|([\w.\-"' \t]+)=)""")  # a header of a table, or a key


def read_literal(text: str) -> Any:
    """Parse a value in TOML or JSON; return any other text as it is."""
    import tomllib

    with suppress(tomllib.TOMLDecodeError, RecursionError):
        return tomllib.loads(f"value = {text}")["value"]
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return text


class ProjectFile(NamedTuple):
    """The project file: `path` is None where there is none; `text` as it was read, for line numbers."""

    path: Path | None = None
    content: Mapping[str, Any] = MappingProxyType({})
    text: str = ""

    def where(self, key: str, table: str = "") -> str:
        """``"easymp.toml, line 3"``: the place of `key` of `table`; without a line where it is not found."""
        target, header = f"{table}.{key}." if table else f"{key}.", ""
        for number, line in enumerate(self.text.splitlines(), 1):
            match = STATEMENT.match(line)
            if match is None:
                continue
            name = re.sub(r"[\"' \t]", "", match[1] or match[2])
            path = f"{name}." if match[1] else f"{header}{name}."
            header = path if match[1] else header
            if path.startswith(target):
                return f"{self.path}, line {number}"
        return str(self.path)


def read(path: Path | str | None = None) -> ProjectFile:
    """The file at `path`. None: the one that EASYMP_CONFIG names, or the one in the working directory, or none."""
    path_text = env.read(VARIABLE) if path is None else str(path)
    file_path = Path(path_text or FILE)
    if not file_path.is_file():
        if path is not None:
            raise SettingError(f"{path_text!r} is not a file: pass a project file, as `easymp config` writes it")
        if path_text:
            raise SettingError(f"{VARIABLE}={path_text!r} in the environment names no file: correct or unset it")
        return ProjectFile()
    import tomllib  # a run without a file does not need it

    try:
        text = file_path.read_text(encoding="utf-8")
        return ProjectFile(file_path, tomllib.loads(text), text)
    except OSError as error:
        raise SettingError(f"{file_path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{file_path} is not valid TOML: {error}") from error


# -- One setting as a field of a record

Size = int | str  # bytes, kept as an int; given as a number or in words: 16e9, "16GiB", "500 MB"
Words = str  # several, with commas; a file may also hold a list
Table = Mapping[str, Any]  # options by name
Function = Callable[[Any], object]
# The type of a setting begins with one of str, int, float, bool, `Size`, `Words`, `Table` and `Function`. A str
# without choices is any text, or a whole number.


def checked(f: dataclasses.Field[Any], value: Any, prefix: str) -> Any:
    """Convert `value` to the field's type; raise a SettingError that begins with `where` if it does not fit."""
    kind, switch, choices = str(f.type).split(" ")[0], f.metadata["switch"], f.metadata["choices"]
    if value is None and f.default is None:
        return None
    of_table = isinstance(value, str) and value.lstrip().startswith("{")
    if kind == "Table" or ("Table" in str(f.type) and (of_table or not isinstance(value, (str, bool)))):
        table = read_literal(value) if isinstance(value, str) else value
        if isinstance(table, Mapping) and all(isinstance(key, str) for key in table):
            return {key: tuple(v) if isinstance(v, list) else v for key, v in table.items()}
        if dataclasses.is_dataclass(table):  # an argument
            return table
        fault = f"neither one of {', '.join(choices)} nor a table" if choices else "not a table"
        raise SettingError(
            f"{prefix}{value!r} is {fault}: write [{f.name}] and its options below, or {{option = value}} in one line"
        )
    if switch and str(value).lower() in ("false", "true"):
        return switch[str(value).lower() == "true"]
    if kind == "Words" and not isinstance(value, str):
        if not isinstance(value, (list, tuple)) or not value or not all(isinstance(v, str) for v in value):
            raise SettingError(f"{prefix}{value!r} is neither a text nor a list of texts")
        value = ",".join(value)
    if kind == "bool":
        if str(value).lower() not in env.TRUE | env.FALSE or not isinstance(value, (str, bool)):
            raise SettingError(f"{prefix}{value!r} is neither yes nor no: use true or false")
        return str(value).lower() in env.TRUE
    if kind == "Size":
        return read_bytes(value, prefix)
    if kind == "Function":
        if not callable(value):
            raise SettingError(f"{prefix}{value!r} is not a function: pass one in Python, by Settings({f.name}=...)")
        return value
    if kind in ("int", "float"):
        return _number(f, kind, value, prefix)
    if not choices and isinstance(value, int) and not isinstance(value, bool):
        return str(value)  # nodes = 2
    if not isinstance(value, str):
        needed_text = f"a word is needed: one of {', '.join(choices)}" if choices else "a word is needed"
        raise SettingError(f"{prefix}{value!r} is of type {type(value).__name__}, but {needed_text}")
    by_lower_case = {choice.lower(): choice for choice in choices}
    if choices and value.lower() not in by_lower_case:
        raise SettingError(f"{prefix}{value!r} is not one of {', '.join(choices)}{nearest(value, choices)}")
    return by_lower_case.get(value.lower(), value)


def _number(f: dataclasses.Field[Any], kind: str, value: Any, prefix: str) -> float:
    minimum, maximum = f.metadata["least"], f.metadata["most"]
    number: type[float] = {"int": int, "float": float}[kind]
    try:
        if isinstance(value, bool) or (kind == "int" and float(value) != int(float(value))):
            raise ValueError
        result = number(value)
        if result != result:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise SettingError(f"{prefix}{value!r} is not a {'whole ' if kind == 'int' else ''}number") from None
    if minimum is not None and not result >= minimum:
        raise SettingError(f"{prefix}{value!r} is below the smallest possible value, {minimum:g}")
    if maximum is not None and result > maximum:
        raise SettingError(f"{prefix}{value!r} is above the largest possible value, {maximum:g}")
    return result


# -- The settings

OVERRIDE = env.PREFIX + "OVERRIDE"  # settings that win over arguments, too: "mixed_precision=bf16 seed=3"
RECORD = env.PREFIX + "RECORD"  # a folder in which the run records itself; see `easymp.trackers.recorder`
NO_SETTINGS = {VARIABLE, env.PREFIX + "LOG_LEVEL", OVERRIDE, RECORD}

NonfiniteAnswer = Literal["raise", "skip", "warn"]
Compiled = Literal["no", "model", "blocks"]


@dataclass(frozen=True)
class Settings:
    """Everything that a user can set from outside the script. Values that were not asked for keep their defaults.

    Example:
        >>> settings = Settings(mixed_precision="bf16")
        >>> settings.source("mixed_precision"), settings.source("strategy")
        ((<Source.ASKED: 'asked for'>, "mixed_precision='bf16'"), (<Source.DEFAULT: 'default'>, 'default'))

    Attributes:
        sources: where values come from, by name; `resolve` fills it.
    """

    mixed_precision: PrecisionName = setting(
        "auto", "type of matrix products; auto decides by the hardware", ("auto", *PRECISIONS, *ALIASES)
    )
    strategy: StrategyName = setting("auto", "how the processes share the model", ("auto", *STRATEGIES))
    gradient_accumulation_steps: int = setting(1, "micro-batches in one optimizer update", least=1)
    cpu: bool = setting(False, "train on the CPU even where there is an accelerator")
    fused: bool = setting(True, "run the fused step of plain torch optimizers where torch has one")
    ema_decay: float | None = setting(None, "decay of an average of the weights, such as 0.999", least=0, most=1 - 1e-9)
    stochastic_rounding: bool = setting(
        False, "keep optimizer states, and under bf16-true the weights, in bf16 that is rounded stochastically"
    )
    convert_sync_batchnorm: bool = setting(False, "batch-norm in training by the samples of all processes")
    nonfinite: NonfiniteAnswer | None = setting(
        None, "answer to what is not finite; default: skip under a loss scale, else warn", get_args(NonfiniteAnswer)
    )
    compile: Compiled | Table | None = setting(
        None, "what torch.compile compiles; or fields of CompileOptions", get_args(Compiled), switch=("no", "model")
    )
    activation_checkpointing: Words | None = setting(
        None,
        "modules that keep only their inputs and are computed again in backward: blocks (the repeated ones), attention "
        "(blocks, which keep matrix products and attention), a size such as 16GiB (as many blocks as a rank's memory "
        "needs), patterns of module or class names with commas, or no",
        switch=("no", "blocks"),
    )
    activation_offload: bool = setting(False, "keep activations in host memory until backward, on CUDA")
    optimizer_in_backward: bool = setting(False, "step each parameter, and free its gradient, in backward")
    gc: bool = setting(True, "collect garbage at every 500th update only, without the objects of the first update")
    seed: int | None = setting(None, "seed of all random streams", least=0, most=2**64 - 1)
    deterministic: bool = setting(False, "deterministic algorithms only")
    timeout: float = setting(120.0, "seconds that a collective waits for other ranks", least=0.001, most=1e9)
    hang_after: float = setting(
        30.0, "seconds until a waiting collective is reported, with every rank's call; 0: never", least=0, most=1e9
    )
    memory: Size | None = setting(None, "memory of a rank, such as 16GiB; default: its device's memory")
    replica_check: int = setting(1000, "updates between comparisons of the ranks' parameters; 0 is off", least=0)
    replay: int = setting(0, "last updates that are kept for `easymp replay`; 0 is off", least=0)
    debug: bool | None = setting(
        None, "compare the ranks' arguments before each collective; on unless false; true: also gradients under zero1"
    )
    project_dir: str | None = setting(None, "folder, or URL of fsspec, for checkpoints and logs; else the working one")
    log_with: Words | None = setting(None, "trackers with commas (default: jsonl), all that are installed, or none")
    save_on_signal: bool | None = setting(
        None, "save and end with exit code 75 at SIGTERM and SIGUSR1: true, false, or from resume on"
    )
    strategy_options: Table | None = setting(
        None, "options of the strategy by the fields of its record, such as cpu_offload of FSDPOptions"
    )
    dataloader_config: Table | DataLoaderConfiguration | None = setting(
        None, "how prepared loaders read: fields of DataLoaderConfiguration, such as split_batches"
    )
    autocast_options: Table | AutocastKwargs | None = setting(
        None, "options of autocast: fields of AutocastKwargs, such as output_dtype"
    )
    scaler_options: Table | GradScalerKwargs | None = setting(
        None, "options of the loss scale: fields of GradScalerKwargs, such as init_scale"
    )
    device_placement: bool = setting(True, "move models and batches to the device")
    initialize: Function | None = setting(
        None, "gives values to a module on the meta device that has no reset_parameters; a function, from Python only"
    )
    sources: Mapping[str, tuple[Source, str]] = field(default_factory=dict, compare=False, repr=False)

    def __new__(cls, *values: Any, **keywords: Any) -> Settings:
        """Remember the arguments, so that a default that is asked for counts. A copy passes all fields."""
        settings = super().__new__(cls)
        arguments = {} if "sources" in keywords else {**dict(zip(NAMES, values)), **keywords}
        object.__setattr__(settings, "_asked", {name for name, value in arguments.items() if value is not None})
        return settings

    def __post_init__(self) -> None:
        for f in NAMES.values():
            object.__setattr__(self, f.name, checked(f, getattr(self, f.name), f"{f.name}="))

    def source(self, name: str) -> tuple[Source, str]:
        """Tell where a value comes from.

        Args:
            name: of a setting.

        Returns:
            The source, and words for it such as ``"EASYMP_SEED in the environment"``.
        """
        if name in self.sources:
            return self.sources[name]
        if name in self._asked or getattr(self, name) != NAMES[name].default:  # type: ignore[attr-defined]
            return Source.ASKED, "asked for" if name in TABLES else f"{name}={getattr(self, name)!r}"
        return Source.DEFAULT, "default"


NAMES: dict[str, dataclasses.Field[Any]] = {f.name: f for f in dataclasses.fields(Settings) if f.name != "sources"}
TABLES = [name for name, f in NAMES.items() if "Table" in str(f.type)]
_told = (f"\n    {f.name}: {f.metadata['help']}." for f in NAMES.values())
Settings.__doc__ = inspect.cleandoc(Settings.__doc__ or "") + "".join(_told)  # for help()


@dataclass(frozen=True)
class Launching:
    """How `easymp launch` starts a script: its flags, else the table ``[launch]`` of the project file."""

    processes: int | None = setting(None, "processes on each node; else one an accelerator, or one without", least=1)
    nodes: str | None = setting(None, "number of machines, such as 2; or 1:4, from at least 1 to at most 4")
    main_address: str | None = setting(None, "the first node's address, by which the others reach it")
    main_port: int | None = setting(None, "a free port on it; else 29500", least=1, most=65535)
    max_restarts: int | None = setting(
        None, "restarts of all workers after one failed; else 0, or 3 where nodes may come and go", least=0
    )
    wait: float = setting(600.0, "seconds that the machines wait for one another", least=0, most=1e9)
    grace: float = setting(30.0, "seconds in which workers save after a signal", least=0, most=1e9)


LAUNCHING: dict[str, dataclasses.Field[Any]] = {f.name: f for f in dataclasses.fields(Launching)}


def resolve(given: Settings | None = None, **arguments: Any) -> Settings:
    """Collect the settings in force: arguments first, then `given`, the environment, the project file, and defaults.

    ``EASYMP_OVERRIDE`` wins over all of them, so that a script that names its settings can run with others.

    Args:
        given: settings; arguments of its constructor, unless None, count as asked for.
        arguments: single settings; None means not given.

    Returns:
        The settings, each with its source.

    Raises:
        SettingError: a wrong name or value, anywhere; the nearest right one is named.

    Example:
        >>> resolve(seed=3).source("seed")
        (<Source.ASKED: 'asked for'>, 'seed=3')
    """
    values: dict[str, Any] = {}
    sources: dict[str, tuple[Source, str]] = {}

    def set_value(name: str, value: Any, source: Source, origin: str) -> None:
        name, dot, option = name.partition(".")
        if dot:
            before = sources.get(name, (source, ""))[1].replace("asked for", f"{name} of the script")
            value = {**as_table(values.get(name)), option: value}
            origin = f"{before} and {origin}".removeprefix(" and ")
        values[name], sources[name] = value, (source, origin)

    file = read()
    for name, value in _read(file, NAMES).items():
        set_value(name, value, Source.CONFIG, file.where(name) if name in TABLES else str(file.path))
    variables = {env.PREFIX + name.upper(): name for name in NAMES}
    for variable in env.names(env.PREFIX):
        if variable not in NO_SETTINGS | set(variables):
            hint = f"{nearest(variable, NO_SETTINGS | set(variables)) or '.'} Unset it or correct its name"
            raise SettingError(f"{variable} in the environment is not a setting{hint}")
        if variable in variables and env.read(variable):  # an empty variable is the shell's way to unset one
            value = checked(NAMES[variables[variable]], env.read(variable), f"{variable}=")
            set_value(variables[variable], value, Source.ENVIRONMENT, f"{variable} in the environment")
    if given is not None:
        for name in NAMES:
            source, origin = given.source(name)
            if source is not Source.DEFAULT:
                set_value(name, getattr(given, name), source, origin)
    for name, value in arguments.items():
        if name not in NAMES:
            hint = nearest(name, NAMES) or "."
            raise SettingError(f"{name!r} is not a setting{hint} Known: {', '.join(NAMES)}")
        if value is not None:
            value = checked(NAMES[name], value, f"{name}=")
            set_value(name, value, Source.ASKED, "asked for" if name in TABLES else f"{name}={value!r}")
    for name, value in read_pairs(shlex.split(env.read(OVERRIDE) or ""), f"{OVERRIDE}: ").items():
        set_value(name, value, Source.ASKED, f"{name}={value!r} by --set")
    return Settings(**values, sources=sources)


def resolve_launching(path: str | None = None, **flags: Any) -> Launching:
    """How to launch: `flags`, then the project file at `path` (None: the usual one), then defaults."""
    flag_values = {n: checked(LAUNCHING[n], v, f"{n}=") for n, v in flags.items() if v is not None}
    return Launching(**_launching(read(path)) | flag_values)


def written(file: ProjectFile) -> dict[str, Any]:
    """The values in `file`, those of its table included."""
    return {**_read(file, NAMES), **_launching(file)}


def _launching(file: ProjectFile) -> dict[str, Any]:
    table = file.content.get(LAUNCH, {})
    if not isinstance(table, dict):
        message = f"{LAUNCH} = {table!r} is not a table: write [{LAUNCH}], and its settings below"
        raise SettingError(f"{file.where(LAUNCH)}: {message}")
    return _read(file._replace(content=table), LAUNCHING, LAUNCH)


def _read(file: ProjectFile, fields: Mapping[str, dataclasses.Field[Any]], table: str = "") -> dict[str, Any]:
    """The values of `file` for the fields `known`."""
    values = {}
    for key, value in file.content.items():
        if key in fields:
            values[key] = checked(fields[key], value, f"{file.where(key, table)}: {key} = ")
        elif table or key != LAUNCH:
            table_text = f" of [{table}]" if table else ""
            other_fields, home = (NAMES, "the top of the file") if table else (LAUNCHING, f"the table [{LAUNCH}]")
            hint = f": it belongs to {home}." if key in other_fields else nearest(key, fields) or "."
            raise SettingError(
                f"{file.where(key, table)}: {key!r} is not a setting{table_text}{hint} Known: {', '.join(fields)}"
            )
    return values


def as_record(kind: type[T], owner: str, options: Any) -> T:
    """Convert the `options` of `owner` to the dataclass `kind`; they may be one, or a mapping, or None for defaults."""
    if isinstance(options, kind):
        return options
    if dataclasses.is_dataclass(options) and issubclass(kind, type(options)):
        options = as_table(options)  # of a strategy that has further options
    if options is not None and not isinstance(options, Mapping):
        type_name = type(options).__name__
        raise SettingError(f"{owner} takes {kind.__name__}, or a dict of its fields, not a {type_name}")
    names = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
    refuse_retired(kind, options or ())
    for name in options or ():
        if name not in names:
            owners = [
                strategy_name
                for strategy_name, strategy in STRATEGIES.items()
                if strategy.several and any(field.name == name for field in dataclasses.fields(strategy.Options))
            ]
            strategic = any(issubclass(strategy.Options, kind) for strategy in STRATEGIES.values())
            hint = f": it belongs to {', '.join(owners)}." if strategic and owners else nearest(name, names) or "."
            raise SettingError(f"{owner} has no option {name!r}{hint} Known: {', '.join(names)}")
    return kind(**(options or {}))


def read_record(settings: Settings, name: str, read: Callable[[Any], T]) -> T:
    """Call `read` on the value of `name`. Its SettingError names the source, unless that is an argument."""
    try:
        return read(getattr(settings, name))
    except SettingError as error:
        origin = settings.source(name)[1]
        if origin in ("asked for", "default") or origin.startswith(f"{name}="):
            raise
        raise SettingError(f"{origin}: {error}") from None


def as_table(value: Any) -> dict[str, Any]:
    """The options in a table, a record, or a word (of `compile`)."""
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, str):
        return {} if value == "no" else {"what": value}
    return dict(value or {})


def read_pairs(
    pairs: Sequence[str],
    prefix: str = "--set ",
    fields: Mapping[str, dataclasses.Field[Any]] = NAMES,
    readers: Mapping[str, Callable[[str], Any]] | None = None,
) -> dict[str, Any]:
    """``["seed=3", "strategy_options.cpu_offload=true"]`` by name; an option of a table keeps its dotted name.

    `prefix` begins the error of a wrong name or value; `readers` has functions that read the texts of single names.
    """
    values = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        table, dot, option = name.partition(".")
        if table not in fields or (dot and (table not in TABLES or not option)):
            hint = ": it is a flag of `easymp launch`." if name in LAUNCHING else nearest(name, fields) or "."
            raise SettingError(f"{prefix}{pair}: {name!r} is not a setting{hint} Known: {', '.join(fields)}")
        if not equals:
            raise SettingError(f"{prefix}{pair}: there is no value; write {prefix}{name}=VALUE")
        try:
            reader = (readers or {}).get(name)
            values[name] = read_literal(text) if dot else reader(text) if reader else checked(fields[name], text, "")
        except SettingError as error:
            raise SettingError(f"{prefix}{pair}: {error}") from None
    return values


def overrides(pairs: Sequence[str]) -> dict[str, str]:
    """The environment variable that passes the settings of ``--set`` to runs. Raises SettingError for a wrong pair."""
    read_pairs(pairs)
    return {OVERRIDE: " ".join([env.read(OVERRIDE) or "", *map(shlex.quote, pairs)])} if pairs else {}
