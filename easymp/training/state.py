"""The open run: what was asked for and the plan, and views of it for code that has no Accelerator at hand.

Accelerators register here when they open and leave when they close, so one can be made after another.
"""

from __future__ import annotations

import copyreg
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from .. import hardware, trackers
from ..base.accumulation import UpdateWindow
from ..data import PreparedLoader
from ..distributed import World, check_backend, locate, read_ranks
from ..distributed.processes import Processes
from ..errors import ArgumentError, RefusedError, SettingError, StepError, nearest
from ..logging import get_logger
from ..options import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    by_kind,
)
from ..plan import Plan, make_plan
from ..precision import PRECISIONS, Measured
from ..protocols import Choice
from ..registry import PrecisionName, reported
from ..settings import NAMES, Settings, as_record, read_record, resolve
from ..strategies import STRATEGIES
from ..strategies.transforms import CompileOptions, Recompute, read_compile, read_which

logger = get_logger(__name__)

# Keywords of Accelerate's that have another place here, or none.
ELSEWHERE = {
    "rng_types": "there is nothing to synchronise: data order is f(seed, epoch) on every rank. Leave it out",
    "dynamo_plugin": "pass compile=CompileOptions(...)",
    **{
        name: f"pass dataloader_config=DataLoaderConfiguration({name}=...)"
        for name in ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler")
    },
    "deepspeed_plugin": "pass strategy='zero1' (ZeRO-1) or 'fsdp' (ZeRO-2 and 3), and strategy_options",
    "deepspeed_plugins": "pass strategy='zero1' (ZeRO-1) or 'fsdp' (ZeRO-2 and 3), and strategy_options",
    "fsdp_plugin": "pass strategy='fsdp' and strategy_options=FSDPOptions(...)",
    "torch_tp_plugin": "pass strategy='tensor_parallel' and strategy_options=TensorParallelOptions(...)",
    "megatron_lm_plugin": "pass strategy='tensor_parallel' or 'pipeline', and strategy_options",
    "parallelism_config": "pass strategy='hsdp' or 'tensor_parallel', and strategy_options",
}


# -- What an Accelerator was asked for


def refuse_argument(name: str, value: Any, known: Iterable[str]) -> None:
    """Refuse a keyword that Accelerator() does not take; None for one of Accelerate's is ignored, for its scripts may pass that."""
    if name not in ELSEWHERE:
        raise ArgumentError(f"Accelerator() has no argument {name!r}{nearest(name, known)}")
    if value is not None:
        raise RefusedError(f"Accelerator({name}={value!r}) is not honoured: {ELSEWHERE[name]}")


class Asked(NamedTuple):
    """The arguments of an Accelerator: settings, the plan that follows from them, and records of options."""

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
    recompute: Recompute | None
    profiling: ProfileKwargs | None
    trackers: Mapping[str, Any]  # the script's own, by lower-case name
    backend: str | None


def read_arguments(given: Mapping[str, Any]) -> Asked:
    """Read the arguments of an Accelerator, by name, with the other sources of settings, and make the plan."""
    asked = {name: value for name, value in given.items() if name in NAMES}
    handlers = by_kind(given["kwargs_handlers"])
    group = handlers.get(InitProcessGroupKwargs)
    project, folder = given["project_config"] or ProjectConfiguration(), given["project_dir"]
    asked["project_dir"] = project.project_dir if folder is None else os.fspath(folder)
    if project.project_dir not in (None, asked["project_dir"]):
        raise SettingError(
            f"project_dir={folder!r} contradicts project_config's {project.project_dir!r}: pass one of them"
        )
    plugin, steps = given["gradient_accumulation_plugin"], given["gradient_accumulation_steps"]
    if plugin is not None:
        if steps not in (None, 1, plugin.num_steps):
            words = f"contradicts the plugin's num_steps={plugin.num_steps}: pass one of them"
            raise SettingError(f"gradient_accumulation_steps={steps} {words}")
        asked["gradient_accumulation_steps"] = plugin.num_steps
    if group and given["timeout"] is None:
        asked["timeout"] = group.seconds
    asked["log_with"], own = trackers.words_of(given["log_with"])
    dynamo = str(getattr(given["dynamo_backend"], "value", given["dynamo_backend"]) or "no").lower()
    for name, other, record in (
        ("compile", "dynamo_backend", None if dynamo == "no" else {"backend": dynamo}),
        ("strategy_options", "kwargs_handlers", handlers.get(DistributedDataParallelKwargs)),
        ("scaler_options", "kwargs_handlers", handlers.get(GradScalerKwargs)),
    ):
        if record and asked.get(name) not in (None, False, "no"):
            raise SettingError(f"both {name} and {other} say it: pass one of them")
        asked[name] = record or asked.get(name)
    settings = resolve(given["settings"], **asked)

    def options(name: str, kind: type, owner: str = "") -> Any:
        return read_record(settings, name, partial(as_record, kind, owner or name))

    compiled = read_record(settings, "compile", read_compile)
    if settings.activation_offload and compiled and compiled.mode in ("reduce-overhead", "max-autotune"):
        raise RefusedError(
            f"activation_offload=True with mode={compiled.mode!r} of torch.compile, whose CUDA graphs keep activations in memory of "
            "their own: use another mode, or leave activation_offload out"
        )
    recompute = read_record(settings, "activation_checkpointing", read_which)
    if settings.project_dir not in (None, project.project_dir):
        project.set_directories(settings.project_dir)
    plan = make_plan(settings, hardware.detect(), locate(read_ranks(), settings.timeout))
    if plan.compile is not None and plan.compile.value != "no":
        compiled = CompileOptions("blocks")
    strategy = STRATEGIES[plan.strategy.value]
    spread = options("strategy_options", strategy.Options, f"strategy {strategy.name!r}")
    scaling = options("scaler_options", GradScalerKwargs)
    scaled = PRECISIONS.get(plan.precision.value, Measured).scaled and scaling.enabled
    if settings.nonfinite == "skip" and not scaled and getattr(spread, "remembers", False):
        raise RefusedError(
            f"nonfinite='skip' with comm_hook={spread.comm_hook!r}, which remembers what it did not send: a gradient that is not "
            "finite would stay in it for good. Use nonfinite='raise', or another comm_hook"
        )
    accumulation = plugin or GradientAccumulationPlugin(plan.accumulation.value)
    loading = options("dataloader_config", DataLoaderConfiguration)
    autocast, profiling = handlers.get(AutocastKwargs, AutocastKwargs()), handlers.get(ProfileKwargs)
    backend = group.backend if group else None
    return Asked(
        *(settings, plan, strategy, spread, project, accumulation, loading, scaling, scaled),
        *(autocast, compiled, recompute, profiling, own, backend),
    )


# -- The run


@dataclass(slots=True)
class Run:
    """The world, plan and window of an open Accelerator, or of a PartialState made without one; `accelerator()` is None then."""

    world: World
    plan: Plan
    window: UpdateWindow
    accelerator: Callable[[], Any] = lambda: None


def make_precision(run: Run, autocast: AutocastKwargs) -> Any:
    """The planned precision; "auto" replaces the plan of `run` once it has been timed."""
    kind, settings = PRECISIONS.get(run.plan.precision.value), run.plan.settings
    if kind is not None:
        return kind(autocast)  # type: ignore[call-arg]

    def decided(choice: Choice[str]) -> None:
        run.plan = replace(run.plan, precision=choice)
        logger.info("precision %s: %s", choice.value, choice.reason)

    return Measured(autocast, run.world, settings.probe and not settings.deterministic, decided)


_open: dict[int, Run] = {}  # in the order in which they opened


def register(run: Run) -> None:
    """Add an open run; views show the newest one."""
    _open[id(run)] = run


def unregister(run: Run) -> None:
    _open.pop(id(run), None)


def _leave(chosen: Callable[[Run], bool]) -> None:
    """Close those runs that states opened by themselves."""
    for run in [run for run in _open.values() if run.accelerator() is None and chosen(run)]:
        unregister(run)
        run.world.close()


def accelerators() -> list[Any]:
    """The open Accelerators."""
    return [there for run in _open.values() if (there := run.accelerator()) is not None]


def is_open() -> bool:
    """Whether there is an Accelerator, or a PartialState without one."""
    return bool(_open)


def current_world(cpu: bool | None = None, backend: str | None = None, timeout: float | None = None) -> World:
    """The newest open run's world; where none is open, one is joined by the environment's launch variables."""
    if not _open:
        settings = resolve(cpu=cpu, timeout=timeout)
        plan = make_plan(settings, hardware.detect(), locate(read_ranks(), settings.timeout))
        world = World(plan.ranks, torch.device(plan.device.value), settings.timeout, settings.debug, backend)
        register(Run(world, plan, UpdateWindow()))
    return _newest("current_world").world


class View:
    """A view of the open run. Pickled, it shows the run that is open where it is used."""

    def __reduce__(self) -> Any:
        return copyreg.__newobj__, (type(self),)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        """After unpickling, the first use looks for the run."""
        if name in ("_run", "_world", "_window") and not vars(self).keys() & {"_world", "_window"}:
            self.__init__()  # type: ignore[misc]
            return getattr(self, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    initialized = True  # a view without a run cannot be made
    _shared_state = _open  # libraries ask whether it is empty

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """End a run of one process that a state opened; one of an Accelerator ends with it."""
        _leave(lambda run: run.world.size == 1)


class PartialState(View, Processes):
    """The process and its ranks. Made without an Accelerator, it joins the other processes by itself.

    Args:
        cpu: use the CPU although there is an accelerator.
        backend: as in `InitProcessGroupKwargs`; these three are for the first state or Accelerator of a process only.
        init_method: as there.
        timeout: seconds that a rank waits for the others in a collective, or a timedelta.

    Raises:
        RefusedError: a run is open that has decided otherwise.
        WorldError: announced processes did not arrive.

    Example:
        >>> state = PartialState(cpu=True)
        >>> state.device, state.num_processes, state.process_index, state.local_process_index
        (device(type='cpu'), 1, 0, 0)
        >>> state.is_main_process, state.is_local_main_process, state.is_last_process, state.use_distributed
        (True, True, True, False)
        >>> state.distributed_type.value
        'NO'
        >>> state.wait_for_everyone()
        >>> state.print("once a node")
        once a node
        >>> state.destroy_process_group()
    """

    def __init__(
        self,
        cpu: bool | None = None,
        *,
        backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | float | None = None,
    ) -> None:
        group = InitProcessGroupKwargs(backend, init_method, 120.0 if timeout is None else timeout)
        seconds = None if timeout is None else group.seconds
        if _open:
            world = _newest("PartialState").world
            check_backend(backend, world.device)
            if seconds not in (None, world.timeout):
                raise RefusedError(
                    f"PartialState(timeout={timeout!r}) in a run that is open with {world.timeout:g} seconds: make this PartialState "
                    "before the Accelerator, or pass InitProcessGroupKwargs to that one"
                )
        self._world = current_world(cpu, backend, seconds)
        if cpu and self.device.type != "cpu":
            raise RefusedError(
                f"PartialState(cpu=True) in a run that is open on {self.device}: make it first, or pass cpu=True to the Accelerator"
            )

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave the other processes, if a PartialState joined them without an Accelerator; an Accelerator does it in `end_training`.

        Args:
            group: makes no difference: the group of all processes is left.

        Example:
            >>> state = PartialState(cpu=True)
            >>> state.destroy_process_group()
        """
        _leave(lambda run: run.world is self._world)


class AcceleratorState(View, Processes):
    """The process and the plan of the open Accelerator.

    Raises:
        StepError: no Accelerator is open.

    Example:
        >>> acc = Accelerator(cpu=True, mixed_precision="no")
        >>> state = AcceleratorState()
        >>> state.plan.strategy.value, state.mixed_precision, state.deepspeed_plugin
        ('single', 'no', None)
    """

    def __init__(self) -> None:
        self._run = _newest("AcceleratorState")
        self._world = self._run.world

    destroy_process_group = PartialState.destroy_process_group

    @property
    def plan(self) -> Plan:
        """The decisions and their reasons."""
        return self._run.plan

    @property
    def _sharded(self) -> bool:
        return STRATEGIES[self.plan.strategy.value].sharded

    @property
    def mixed_precision(self) -> PrecisionName:
        """The planned precision: "no" for fp32, any other by its name."""
        return reported(self.plan.precision.value)

    @property
    def fsdp_plugin(self) -> Any:
        """The `FullyShardedDataParallelPlugin` of a script of Accelerate on several processes; else None.

        Example:
            >>> Accelerator(cpu=True).state.fsdp_plugin is None
            True
        """
        return getattr(self._run.accelerator(), "_fsdp_plugin", None)

    @property
    def deepspeed_plugin(self) -> None:
        """None, for scripts that ask: what DeepSpeed shards is strategy "zero1" or "fsdp" here."""
        return None


class GradientState(View):
    """The open run's place in its accumulation window and in the loop over its data.

    Args:
        window: the window to show; None takes that of the open Accelerator.

    Raises:
        StepError: no Accelerator is open.

    Example:
        >>> acc = Accelerator(cpu=True, gradient_accumulation_steps=2)
        >>> state = GradientState()
        >>> state.num_steps, state.sync_gradients, state.sync_with_dataloader
        (2, True, True)
        >>> for batch in acc.prepare(torch.utils.data.DataLoader(range(2))):
        ...     print(batch, state.in_dataloader, state.end_of_dataloader, state.active_dataloader.batch_size, state.remainder)
        tensor([0]) True False 1 0
        tensor([1]) True True 1 0
    """

    plugin_kwargs: Mapping[str, Any] = MappingProxyType({})  # transformers' Trainer reads it
    adjust_scheduler: bool = True  # prepared schedulers count optimizer updates

    def __init__(self, window: UpdateWindow | None = None) -> None:
        self._window = window if window is not None else _newest("GradientState").window

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-step ends its window; a script that counts micro-steps itself sets it."""
        return self._window.sync

    @sync_gradients.setter
    def sync_gradients(self, sync: bool) -> None:
        self._window.sync = sync

    def _set_sync_gradients(self, sync: bool) -> None:
        """As the setter; transformers' Trainer calls it."""
        self._window.sync = sync

    @property
    def num_steps(self) -> int:
        """Micro-steps in a window."""
        return self._window.accumulation

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether a loader's last batch ends the window early."""
        return self._window.end_with_loader

    @property
    def active_dataloader(self) -> PreparedLoader | None:
        """The prepared loader that is being read, the innermost one; None outside of such loops."""
        return self._window.reading

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being read."""
        return self._window.reading is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch at hand is the loader's last one."""
        loader = self._window.reading
        return loader is not None and bool(loader.last)

    @property
    def remainder(self) -> int:
        """As the loader's that is being read; -1 outside of such loops."""
        loader = self._window.reading
        return -1 if loader is None else loader.remainder


def _newest(what: str) -> Run:
    if not _open:
        raise StepError(f"{what}() needs an open Accelerator: make one first")
    return next(reversed(_open.values()))
