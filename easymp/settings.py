"""What was asked, by argument, environment or project file: each setting said once.

A field of `Settings` and its metadata give the argument's name, the environment's (``EASYMP_`` and the name in capitals), the
key in ``easymp.toml``, the allowed values, and the words of help. `resolve` reads them in that order of precedence. `Launching` is
the same for `easymp launch`: its flags, and the table ``[launch]`` of the file.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import env, project_file
from .errors import SettingError, nearest
from .project_file import LAUNCH, OPTIONS, ProjectFile
from .protocols import Source
from .registry import ALIASES, PRECISIONS, STRATEGIES
from .values import Size, checked, setting

OVERRIDE = (
    env.PREFIX + "OVERRIDE"
)  # settings that win over arguments, too: "mixed_precision=bf16 strategy=fsdp"
RECORD = env.PREFIX + "RECORD"  # a folder in which the run writes down what it does; see `easymp.recording`
NO_SETTINGS = {
    project_file.VARIABLE,
    env.PREFIX + "LOG_LEVEL",
    OVERRIDE,
    RECORD,
}  # variables of ours that are none


@dataclass(frozen=True)
class Settings:
    """Everything a user can set from outside the script. Values that were not asked for keep their defaults."""

    mixed_precision: str = setting(
        "auto",
        "what matrix products run in; auto decides by the hardware",
        ("auto", *PRECISIONS, *ALIASES),
    )
    strategy: str = setting("auto", "how the model is spread over the processes", ("auto", *STRATEGIES))
    gradient_accumulation_steps: int = setting(1, "micro-batches in one optimizer update", least=1)
    cpu: bool = setting(False, "train on the CPU even where there is an accelerator")
    fused: bool = setting(
        True, "let plain torch optimizers run their fused step where torch has one for the device"
    )
    ema_decay: float | None = setting(
        None,
        "keep an exponential moving average of the weights, of which each step keeps so much; 0.999 is usual",
        least=0,
        most=0.999999999,
    )
    probe: bool = setting(
        True, "time fp32 and bf16 in the first training step where no rule is certain; off: the rule alone"
    )
    convert_sync_batchnorm: bool = setting(False, "batch-norm in training by the samples of all processes")
    nonfinite: str | None = setting(
        None,
        "what a loss or gradient that is not finite does: raise, skip the step, or warn once; else skip under a loss scale, and warn",
        ("raise", "skip", "warn"),
    )
    compile: str | None = setting(
        None, "torch.compile: of the whole model, or of each repeated block", ("no", "model", "blocks")
    )
    activation_checkpointing: str | None = setting(
        None,
        "what keeps only its inputs and is computed again in backward: blocks (the repeated ones), patterns of module or class names "
        "with commas, or no",
    )
    seed: int | None = setting(None, "seed of all random streams", least=0, most=2**64 - 1)
    deterministic: bool = setting(False, "deterministic algorithms only; nothing is measured")
    timeout: float = setting(
        120.0, "seconds that a rank waits for the others in a collective", least=0.001, most=1e9
    )
    memory: Size | None = setting(
        None, "what a rank has, such as 16GiB, where auto decides by it; else what its device has"
    )
    replica_check: int = setting(
        1000,
        "compare the parameters of ranks that must hold equal ones after the first updates and every so many; 0 is off",
        least=0,
    )
    debug: bool | None = setting(
        None,
        "compare over the ranks what a script passes to collectives, before each; on unless false. true: also gradients under zero1",
    )
    project_dir: str | None = setting(
        None, "a folder, or a URL of fsspec, for checkpoints and logs; else the working directory"
    )
    log_with: str | None = setting(
        None,
        "what `log` writes to: jsonl (the default), tensorboard, wandb, mlflow, several with commas, all that are installed, or none",
    )
    strategy_options: Mapping[str, Any] | None = None  # in the file, the table of this name
    sources: Mapping[str, tuple[Source, str]] = field(default_factory=dict, compare=False, repr=False)

    def __new__(cls, *values: Any, **named: Any) -> Settings:
        """Notes what is passed, so that a default that is asked for counts; not of a copy, which passes all fields and their sources."""
        made = super().__new__(cls)
        given = {} if "sources" in named else {**dict(zip(NAMES, values)), **named}
        object.__setattr__(made, "_asked", {name for name, value in given.items() if value is not None})
        return made

    def __post_init__(self) -> None:
        for f in NAMES.values():
            object.__setattr__(self, f.name, checked(f, getattr(self, f.name), f"{f.name}="))

    def source(self, name: str) -> tuple[Source, str]:
        """Where the value comes from, and the words for it, such as ``"EASYMP_SEED in the environment"``."""
        if name in self.sources:
            return self.sources[name]
        if name in self._asked or getattr(self, name) != NAMES[name].default:  # type: ignore[attr-defined]
            return Source.ASKED, "asked for"
        return Source.DEFAULT, "default"


NAMES: dict[str, dataclasses.Field[Any]] = {
    f.name: f for f in dataclasses.fields(Settings) if f.name not in ("sources", OPTIONS)
}


@dataclass(frozen=True)
class Launching:
    """How `easymp launch` starts a script: its flags, where they are not given the table ``[launch]`` of the project file."""

    processes: int | None = setting(
        None, "processes on each node; else one an accelerator, or one without any", least=1
    )
    nodes: str | None = setting(
        None, "how many machines take part, such as 2; or 1:4, from at least 1 to at most 4"
    )
    main_address: str | None = setting(None, "the first node's address, by which the others reach it")
    main_port: int | None = setting(None, "a free port on it; else 29500", least=1, most=65535)
    max_restarts: int | None = setting(
        None,
        "how often all workers are started again after one failed; else 0, or 3 where nodes may come and go",
        least=0,
    )
    wait: float = setting(600.0, "seconds that the machines wait for one another", least=0, most=1e9)
    grace: float = setting(
        30.0, "seconds that workers have to save themselves when a signal comes", least=0, most=1e9
    )
    numa: bool = setting(
        True, "keep each worker on the cores of one NUMA node, on Linux machines with several"
    )


LAUNCHING: dict[str, dataclasses.Field[Any]] = {f.name: f for f in dataclasses.fields(Launching)}


def resolve(given: Settings | None = None, **arguments: Any) -> Settings:
    """The settings in force: arguments first, then `given`, the environment, the project file, and defaults.

    ``EASYMP_OVERRIDE`` wins over them all: it makes a script that names its settings run with others.

    Args:
        given: a whole Settings object; what was passed to it, and is not None, counts as asked for.
        arguments: single settings; None means not given.

    Raises:
        SettingError: a wrong name or value, anywhere; the nearest right one is named.
    """
    values: dict[str, Any] = {}
    sources: dict[str, tuple[Source, str]] = {}

    def take(name: str, value: Any, source: Source, words: str) -> None:
        values[name], sources[name] = value, (source, words)

    file = project_file.read()
    if OPTIONS in file.content:
        table = _table(file, OPTIONS)
        take(
            OPTIONS,
            {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()},
            Source.CONFIG,
            file.where(OPTIONS),
        )
    for name, value in _read(file, NAMES).items():
        take(name, value, Source.CONFIG, str(file.path))
    for name, (value, words) in _from_environment().items():
        take(name, value, Source.ENVIRONMENT, words)
    for name in NAMES if given is not None else ():
        source, words = given.source(name)
        if source is not Source.DEFAULT:
            take(name, getattr(given, name), source, words)
    if given is not None and given.strategy_options is not None:
        take(OPTIONS, given.strategy_options, Source.ASKED, "asked for")
    for name, value in arguments.items():
        if name not in NAMES:
            raise SettingError(
                f"{name!r} is no setting{nearest(name, NAMES) or '.'} Known: {', '.join(NAMES)}"
            )
        if value is not None:
            take(name, value, Source.ASKED, f"{name}={value!r}")
    for name, value in _overrides():
        take(name, value, Source.ASKED, f"{name}={value!r} in {OVERRIDE}")
    return Settings(**values, sources=sources)


def resolve_launching(path: str | None = None, **flags: Any) -> Launching:
    """How to launch: `flags` (None: not given), then the project file at `path` (None: the usual one), then defaults.

    Raises:
        SettingError: a wrong name or value, anywhere.
    """
    found = _launching(project_file.read(path))
    given = {
        name: checked(LAUNCHING[name], value, f"{name}=")
        for name, value in flags.items()
        if value is not None
    }
    return Launching(**{**found, **given})


def written(file: ProjectFile) -> dict[str, Any]:
    """The values that stand in `file`, those of its table too.

    Raises:
        SettingError: a wrong name or value.
    """
    return {**_read(file, NAMES), **_launching(file)}


def _launching(file: ProjectFile) -> dict[str, Any]:
    return _read(dataclasses.replace(file, content=_table(file, LAUNCH)), LAUNCHING, LAUNCH)


def _table(file: ProjectFile, name: str) -> dict[str, Any]:
    table = file.content.get(name, {})
    if not isinstance(table, dict):
        raise SettingError(
            f"{file.where(name)}: {name} = {table!r} is no table: write [{name}], and its settings below"
        )
    return table


def _read(file: ProjectFile, known: Mapping[str, dataclasses.Field[Any]], table: str = "") -> dict[str, Any]:
    """The values of `file` for the fields `known`."""
    found = {}
    for key, value in file.content.items():
        if key in known:
            found[key] = checked(known[key], value, f"{file.where(key, table)}: {key} = ")
        elif table or key not in (LAUNCH, OPTIONS):
            place = f" of [{table}]" if table else ""
            other, home = (NAMES, "the top of the file") if table else (LAUNCHING, f"the table [{LAUNCH}]")
            hint = f": it belongs to {home}." if key in other else nearest(key, known) or "."
            raise SettingError(
                f"{file.where(key, table)}: {key!r} is no setting{place}{hint} Known: {', '.join(known)}"
            )
    return found


def _overrides() -> Iterator[tuple[str, Any]]:
    for pair in shlex.split(env.read(OVERRIDE) or ""):
        name, equals, value = pair.partition("=")
        if name not in NAMES or not equals:
            raise SettingError(
                f"{OVERRIDE} holds {pair!r}, but takes setting=value{nearest(name, NAMES) or '.'} Known: {', '.join(NAMES)}"
            )
        yield name, checked(NAMES[name], value, f"{OVERRIDE}: {name}=")


def _from_environment() -> dict[str, tuple[Any, str]]:
    known = {env.PREFIX + name.upper(): name for name in NAMES}
    ours = NO_SETTINGS | set(known)
    found = {}
    for variable in env.names(env.PREFIX):
        if variable not in ours:
            raise SettingError(
                f"{variable} in the environment is no setting{nearest(variable, ours) or '.'} Unset it or correct its name"
            )
        if variable in known and env.read(variable):  # an empty variable is the shell's way to unset one
            name, words = known[variable], f"{variable} in the environment"
            found[name] = (checked(NAMES[name], env.read(variable), f"{variable}="), words)
    return found
