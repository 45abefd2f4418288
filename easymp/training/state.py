"""What an Accelerator was asked for, the runs that are open, and what all ranks of a run must have alike.

Accelerators register here when they open and leave when they close, so one can be made after another.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import timedelta
from enum import Enum
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .. import conflicts, hardware, trackers
from ..base.accumulation import UpdateWindow
from ..base.parts import Parts
from ..distributed import World, first_difference, locate, odd_one_out, read_ranks
from ..errors import RefusedError, SettingError, StepError, WorldError, redact, with_script_line
from ..optim.torch_step import IMPLEMENTATION
from ..options import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ProjectConfiguration,
)
from ..plan import Plan, make_plan
from ..precision import PRECISIONS
from ..protocols import Strategy
from ..settings import Settings, as_record, read_record, resolve
from ..strategies import STRATEGIES
from ..strategies.transforms import CompileOptions, read_compile

T = TypeVar("T")

# -- What an Accelerator was asked for


class Request(NamedTuple):
    """What an Accelerator was asked for: settings, the plan that follows from them, and records of options."""

    settings: Settings
    plan: Plan
    strategy: Any  # the class
    options: Any  # of the strategy
    project: ProjectConfiguration
    accumulation: GradientAccumulationPlugin
    loading: DataLoaderConfiguration
    scaling: GradScalerKwargs
    scaled: bool  # whether there is a loss scale
    autocast: AutocastKwargs
    compile: CompileOptions | None
    trackers: Mapping[str, Any]  # the script's own, by lower-case name


def read_request(
    settings: Settings | None,
    gradient_accumulation_steps: int | GradientAccumulationPlugin | None,
    project_dir: str | os.PathLike[str] | ProjectConfiguration | None,
    log_with: Any,
    **arguments: Any,
) -> Request:
    """Read the arguments of an Accelerator with the other sources of settings, and make the plan."""
    if isinstance(project_dir, ProjectConfiguration):
        project = project_dir
    else:
        project = ProjectConfiguration(None if project_dir is None else os.fspath(project_dir))
    steps: Any = gradient_accumulation_steps
    accumulation = steps if isinstance(steps, GradientAccumulationPlugin) else None
    names, own_trackers = trackers.words_of(log_with)
    settings = resolve(
        settings,
        gradient_accumulation_steps=steps if accumulation is None else accumulation.num_steps,
        project_dir=project.project_dir,
        log_with=names,
        **arguments,
    )
    if settings.project_dir is not None:
        project.set_directories(settings.project_dir)
    plan = make_plan(settings, hardware.detect(), locate(read_ranks(), settings.timeout))
    compiled = read_record(settings, "compile", read_compile)
    if plan.compile is not None and plan.compile.value != "no":
        compiled = CompileOptions("blocks")
    strategy = STRATEGIES[plan.strategy.value]
    scaling = _record(settings, "scaler_options", GradScalerKwargs)
    return Request(
        settings=settings,
        plan=plan,
        strategy=strategy,
        options=_record(settings, "strategy_options", strategy.Options, f"strategy {strategy.name!r}"),
        project=project,
        accumulation=accumulation or GradientAccumulationPlugin(plan.accumulation.value),
        loading=_record(settings, "dataloader_config", DataLoaderConfiguration),
        scaling=scaling,
        scaled=PRECISIONS[plan.precision.value].scaled and scaling.enabled,
        autocast=_record(settings, "autocast_options", AutocastKwargs),
        compile=compiled,
        trackers=own_trackers,
    )


def _record(settings: Settings, name: str, kind: type[T], owner: str = "") -> T:
    """The options of the setting `name` as a `kind`."""
    return read_record(settings, name, partial(as_record, kind, owner or name))


# -- The run


@dataclass(slots=True, weakref_slot=True, eq=False)
class Run:
    """An open Accelerator's world, plan and all else that parts see; or the world of a PartialState without one."""

    world: World
    plan: Plan  # parts refine its reasons
    window: UpdateWindow
    accelerator: Callable[[], Any] = lambda: None  # returns the Accelerator, or None
    parts: Parts = field(default_factory=Parts)
    project: ProjectConfiguration = field(default_factory=ProjectConfiguration)
    prepared: Any = None  # all objects that were prepared; this and the next two are set once by the Accelerator
    scaler: Any = None
    precision: Any = None
    # Calls that do not go together with something that is in force, each with its sentence.
    refused: Mapping[str, str] = field(default_factory=dict)

    def refine(self, name: str, reason: str, value: Any = None) -> None:
        """Put another reason into the plan, and another value unless it is None."""
        choice = getattr(self.plan, name)
        refined = replace(choice, value=choice.value if value is None else value, reason=reason)
        self.plan = replace(self.plan, **{name: refined})

    def find_refused(self, strategy: Strategy) -> None:
        """Look up what does not go together under `strategy`; a RefusedError for two words that are in force."""
        settings, precision = self.plan.settings, PRECISIONS[self.plan.precision.value]
        in_force = {
            *strategy.words,
            precision.name,
            *conflicts.words_of(settings),
            *(part.name for part in self.parts.all),
        }
        if self.scaler.scales:
            in_force.add("a loss scale")
        rows = list(conflicts.rows_of(strategy, precision, settings))
        rows += [row for part in self.parts.all for row in part.conflicts]
        conflicts.check(in_force, rows)
        self.refused = conflicts.refused_calls(in_force, rows)

    def refuse(self, call: str, *others: str) -> None:
        """Raise a RefusedError where `call` does not go together with something that is in force, or with `others`."""
        if call in self.refused:
            raise RefusedError(self.refused[call])
        if others:
            conflicts.check({call, *others}, conflicts.OPTIONS)


OPEN_RUNS: dict[int, Run] = {}  # in the order in which they opened; views show the newest one


def close_runs(condition: Callable[[Run], bool]) -> None:
    """Close the runs that meet `condition` and have no Accelerator, such as those of `PartialState()`."""
    for run in [run for run in OPEN_RUNS.values() if run.accelerator() is None and condition(run)]:
        del OPEN_RUNS[id(run)]
        run.world.close()


def accelerators() -> list[Any]:
    """The open Accelerators."""
    return [accelerator for run in OPEN_RUNS.values() if (accelerator := run.accelerator()) is not None]


def interruption(accelerator: Any) -> str:
    """The line about a Ctrl-C: the update, and the save or load that has ended last. Nothing is waited for."""
    if not accelerator.is_main_process:
        return ""
    last = accelerator._last
    place = f"acc.resume() continues from {redact('/'.join(last))}" if last else "no checkpoint was saved"
    return f"\ninterrupted after update {accelerator.updates}: {place}\n"


def report_end(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Report a wrong or refused setting, and a Ctrl-C in a run, as one line without a traceback; the hook of `sys`."""
    lines: list[str] = []
    if isinstance(error, (SettingError, RefusedError)):
        lines = [f"{kind.__name__}: {with_script_line(error)}\n"]
    elif isinstance(error, KeyboardInterrupt):  # a run that a ``with`` block has closed left its line as a note
        lines = getattr(error, "__notes__", []) + [interruption(newest) for newest in accelerators()[-1:]]
    if lines:
        sys.stderr.write(lines[0])
    else:
        sys.__excepthook__(kind, error, traceback)


def current_world(cpu: bool | None = None, backend: str | None = None, timeout: float | None = None) -> World:
    """The newest open run's world. If no run is open, join the world that the launch variables announce."""
    if not OPEN_RUNS:
        settings = resolve(cpu=cpu, timeout=timeout)
        plan = make_plan(settings, hardware.detect(), locate(read_ranks(), settings.timeout))
        world = World(plan.ranks, torch.device(plan.device.value), settings.timeout, settings.debug, backend)
        run = Run(world, plan, UpdateWindow())
        OPEN_RUNS[id(run)] = run
    return newest_run("current_world").world


def newest_run(caller: str) -> Run:
    if not OPEN_RUNS:
        raise StepError(f"{caller}() needs an open Accelerator: make one first")
    return next(reversed(OPEN_RUNS.values()))


# -- what all ranks must have alike

# Settings by which ranks may differ: their effect is compared, or they do not change what is trained.
MAY_DIFFER = set(
    "mixed_precision strategy gradient_accumulation_steps cpu timeout hang_after memory project_dir log_with sources "
    "strategy_options dataloader_config scaler_options".split()
)


def compare_prepared(run: Run, objects: Sequence[Any], records: Sequence[Any], lines: Sequence[str]) -> list[int]:
    """Random seeds of all ranks; a WorldError where their objects, dataclasses or further lines differ."""
    plan, world = run.plan, run.world
    facts = [f"{name} {getattr(plan, name).value}" for name in ("precision", "strategy", "accumulation")]
    facts += [f"part {part.name} ({type(part).__name__})" for part in run.parts.all if part in run.parts.users]
    facts += _describe_record(plan.settings, MAY_DIFFER)
    facts += [line for record in records for line in _describe_record(record)]
    facts += [line for item in objects for line in _describe(item)]
    facts += lines
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    digests_and_seeds = world.gather_objects((digest, torch.initial_seed()))
    if any(rank_digest != digest for rank_digest, _ in digests_and_seeds):
        difference = first_difference(world.gather_objects(facts))
        raise WorldError(
            f"the ranks prepare different things: {odd_one_out(difference)}. All ranks must build and prepare the same "
            "objects, with the same settings, parts and hyperparameters"
        )
    return [seed for _, seed in digests_and_seeds]


def _describe(item: Any) -> Iterator[str]:
    """The facts of `item` that must be the same on all ranks, a line each."""
    kind = type(item).__name__
    yield kind
    if isinstance(item, nn.Module):
        for name, p in item.named_parameters():
            yield f"{kind}.{name} {tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}"
    elif isinstance(item, torch.optim.Optimizer):
        for g, group in enumerate(item.param_groups):
            yield f"{kind} group {g} with {len(group['params'])} parameters"
        yield from describe_options(item)
    elif hasattr(item, "dataset") and hasattr(item.dataset, "__len__"):
        sampler, drop_last = type(getattr(item, "sampler", None)).__name__, getattr(item, "drop_last", None)
        yield f"{kind} of {len(item.dataset)} samples, batch size {item.batch_size}"
        yield f"{kind} with a {sampler} and drop_last={drop_last}"
    elif type(item).__module__ == "torch.optim.lr_scheduler":
        yield from (f"{kind} {name}={_text_of(value)}" for name, value in vars(item).items() if name[0] != "_")


def describe_options(optimizer: torch.optim.Optimizer, wait: bool = True) -> Iterator[str]:
    """The options of each param group, a line each, save how the step runs; numbers on a device only with `wait`."""
    kind = type(getattr(optimizer, "given", optimizer)).__name__
    for g, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name not in ("params", "param_names", *IMPLEMENTATION):
                yield f"{kind} group {g} {name}={_text_of(value, wait)}"


def _describe_record(record: Any, without: set[str] | frozenset[str] = frozenset()) -> list[str]:
    """The fields of a dataclass, a line each."""
    names = (f.name for f in fields(record) if f.name not in without)
    return [f"{type(record).__name__} {name}={_text_of(getattr(record, name))}" for name in names]


def _text_of(value: Any, wait: bool = True) -> str:
    """Text by which ranks compare `value`; its type if it is not a plain value."""
    if isinstance(value, Tensor):
        readable = value.numel() == 1 and (wait or value.device.type == "cpu")
        return repr(value.item()) if readable else f"tensor {tuple(value.shape)}"
    if isinstance(value, (set, frozenset)):
        return f"[{', '.join(sorted(map(_text_of, value)))}]"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text_of(v, wait) for v in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_text_of(k)}: {_text_of(v, wait)}' for k, v in value.items())}}}"
    if is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}({', '.join(_describe_record(value))})"
    is_plain = value is None or isinstance(value, (bool, int, float, complex, str, Enum, torch.dtype, timedelta))
    return repr(value) if is_plain else getattr(value, "__qualname__", type(value).__qualname__)
