"""Accelerate's words for processes and precisions, its views of the open run, and its records of options."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from ... import options
from ...base.accumulation import UpdateWindow
from ...distributed import check_backend
from ...distributed.processes import Processes, run_where
from ...errors import RefusedError
from ...options import AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs, ProfileKwargs
from ...registry import PrecisionName, reported
from ...strategies import STRATEGIES
from ...training.state import OPEN_RUNS, close_runs, current_world, newest_run

P = ParamSpec("P")
R = TypeVar("R")


class Word(str, Enum):  # noqa: UP042 (str() of a StrEnum is its value)
    """Base of an enum whose members are strings, with Accelerate's ``str()``: ``"DistributedType.NO"``."""


def _by_value(base: Any, name: str, *values: str) -> Any:
    return base(name, {value.upper(): value for value in values}, module=__name__)


_TYPES = (
    "NO MULTI_CPU MULTI_GPU MULTI_NPU MULTI_MLU MULTI_SDAA MULTI_MUSA MULTI_XPU MULTI_HPU MULTI_NEURON DEEPSPEED FSDP "
    "XLA MEGATRON_LM"
)
DistributedType: Any = _by_value(Word, "DistributedType", *_TYPES.split())
PrecisionType: Any = _by_value(StrEnum, "PrecisionType", "no", "fp8", "fp16", "bf16")


@dataclass(frozen=True)
class InitProcessGroupKwargs(options.KwargsHandler):
    """Options of the process group."""

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | float = 120.0

    def __post_init__(self) -> None:
        method, remedy = self.init_method, "ranks meet where MASTER_ADDR and MASTER_PORT say. Leave it out"
        options.check(method in (None, "env://"), f"init_method={method!r} is not honoured: {remedy}")
        is_time = (isinstance(self.timeout, timedelta) or options.is_number(self.timeout)) and self.seconds > 0
        options.check(is_time, f"timeout={self.timeout!r} is neither a timedelta nor a number of seconds above 0")

    @property
    def seconds(self) -> float:
        """The timeout in seconds."""
        return self.timeout.total_seconds() if isinstance(self.timeout, timedelta) else float(self.timeout)


HANDLERS = (AutocastKwargs, GradScalerKwargs, DistributedDataParallelKwargs, InitProcessGroupKwargs, ProfileKwargs)


def handlers_by_class(kwargs_handlers: Sequence[Any] | None) -> dict[type, Any]:
    """The records in `kwargs_handlers` by their class, at most one of each."""
    handlers: dict[type, Any] = {}
    for handler in kwargs_handlers or ():
        kind, names = type(handler), ", ".join(kind.__name__ for kind in HANDLERS)
        options.check(kind in HANDLERS, f"kwargs_handlers holds a {kind.__name__}; it takes {names}")
        options.check(kind not in handlers, f"kwargs_handlers holds two {kind.__name__}: pass one")
        handlers[kind] = handler
    return handlers


class AllProcesses(Processes):
    """Process control with all of Accelerate's names."""

    _sharded = property(lambda self: False)  # whether the run's strategy shards models
    is_last_process = property(lambda self: self._world.rank == self._world.size - 1)
    use_distributed = property(lambda self: self._world.size > 1)

    @property
    def distributed_type(self) -> Any:
        """How processes are spread, in Accelerate's words."""
        if self._world.size == 1:
            return DistributedType.NO
        if self._sharded:
            return DistributedType.FSDP
        by_device = {"cuda": DistributedType.MULTI_GPU, "xpu": DistributedType.MULTI_XPU}
        return by_device.get(self.device.type, DistributedType.MULTI_CPU)

    def on_local_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function to run on the first process of each node only."""
        return run_where(lambda: self.is_local_main_process, function)


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
    _shared_state = OPEN_RUNS  # libraries ask whether it is empty

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """End a run of one process that a state opened; one of an Accelerator ends with it."""
        close_runs(lambda run: run.world.size == 1)


class PartialState(View, AllProcesses):
    """The process and its ranks. Made without an Accelerator, it joins the other processes by itself."""

    def __init__(
        self, cpu: bool | None = None, *, backend: str | None = None, init_method: str | None = None,
        timeout: timedelta | float | None = None,
    ) -> None:  # fmt: skip
        group = InitProcessGroupKwargs(backend, init_method, 120.0 if timeout is None else timeout)
        seconds = None if timeout is None else group.seconds
        if OPEN_RUNS:
            world = newest_run("PartialState").world
            check_backend(backend, world.device)
            if seconds not in (None, world.timeout) or (cpu and world.device.type != "cpu"):
                raise RefusedError(
                    f"PartialState(cpu={cpu}, timeout={timeout}) in a run that is open on {world.device} with "
                    f"{world.timeout:g} seconds: make it before the Accelerator, or leave these out"
                )
        self._world = current_world(cpu, backend, seconds)

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave the other processes, if a PartialState joined them; an Accelerator does it in `end_training`."""
        close_runs(lambda run: run.world is self._world)


class AcceleratorState(View, AllProcesses):
    """The process and the plan of the open Accelerator."""

    def __init__(self) -> None:
        self._run = newest_run("AcceleratorState")
        self._world = self._run.world

    destroy_process_group = PartialState.destroy_process_group

    plan = property(lambda self: self._run.plan)

    _sharded = property(lambda self: STRATEGIES[self.plan.strategy.value].sharded)

    @property
    def mixed_precision(self) -> PrecisionName:
        """The planned precision: "no" for fp32, any other by its name."""
        return reported(self.plan.precision.value)

    # The `FullyShardedDataParallelPlugin` of a script of Accelerate on several processes.
    fsdp_plugin = property(lambda self: getattr(self._run.accelerator(), "_fsdp_plugin", None))
    deepspeed_plugin = None  # scripts ask: what DeepSpeed shards is strategy "zero1" or "fsdp" here


class GradientState(View):
    """The open run's place in its accumulation window and in the loop over its data."""

    plugin_kwargs: Mapping[str, Any] = MappingProxyType({})  # transformers' Trainer reads it
    adjust_scheduler: bool = True  # prepared schedulers count optimizer updates

    def __init__(self, window: UpdateWindow | None = None) -> None:
        self._window = window if window is not None else newest_run("GradientState").window

    def _set_sync_gradients(self, sync: bool) -> None:
        """Set `sync_gradients`, as transformers' Trainer does."""
        self._window.sync = sync

    # Whether the current micro-step ends its window; a script that counts micro-steps itself sets it.
    sync_gradients = property(lambda self: self._window.sync, _set_sync_gradients)
    num_steps = property(lambda self: self._window.accumulation)
    sync_with_dataloader = property(lambda self: self._window.end_with_loader)
    active_dataloader = property(lambda self: self._window.reading)  # the innermost loop's; None outside of loops
    in_dataloader = property(lambda self: self._window.reading is not None)

    # Whether the batch at hand is the loader's last one; and the `remainder` of the loader, -1 outside of loops.
    end_of_dataloader = property(lambda self: bool(getattr(self._window.reading, "last", False)))
    remainder = property(lambda self: getattr(self._window.reading, "remainder", -1))
