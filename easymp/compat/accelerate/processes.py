"""Accelerate's words for processes and precisions, its views of the open run, and its records of options."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from ...base.accumulation import UpdateWindow
from ...data import PreparedLoader
from ...distributed import check_backend
from ...distributed.processes import Processes, run_where
from ...errors import RefusedError, WorldError
from ...options import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    KwargsHandler,
    ProfileKwargs,
    check,
    is_number,
)
from ...plan import Plan
from ...registry import PrecisionName, reported
from ...strategies import STRATEGIES
from ...training.state import OPEN_RUNS, close_runs, current_world, newest_run

P = ParamSpec("P")
R = TypeVar("R")


class DistributedType(StrEnum):
    """How the processes of a run are spread, in Accelerate's words."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"


class PrecisionType(StrEnum):
    """Precisions in Accelerate's words."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


@dataclass(frozen=True)
class InitProcessGroupKwargs(KwargsHandler):
    """Options of the process group."""

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | float = 120.0

    def __post_init__(self) -> None:
        words = "ranks meet where the launcher says (MASTER_ADDR and MASTER_PORT). Leave it out"
        asked = f"init_method={self.init_method!r} is not honoured: {words}"
        check(self.init_method in (None, "env://"), asked)
        good = (isinstance(self.timeout, timedelta) or is_number(self.timeout)) and self.seconds > 0
        check(good, f"timeout={self.timeout!r} is neither a timedelta nor a number of seconds above 0")

    @property
    def seconds(self) -> float:
        """The timeout in seconds."""
        return self.timeout.total_seconds() if isinstance(self.timeout, timedelta) else float(self.timeout)


HANDLERS: tuple[type[Any], ...] = (
    AutocastKwargs,
    GradScalerKwargs,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)


def handlers_by_class(kwargs_handlers: Sequence[Any] | None) -> dict[type, Any]:
    """The records in `kwargs_handlers` by their class, at most one of each."""
    handlers: dict[type, Any] = {}
    for handler in kwargs_handlers or ():
        kind, names = type(handler), ", ".join(kind.__name__ for kind in HANDLERS)
        check(kind in HANDLERS, f"kwargs_handlers holds a {kind.__name__}; it takes {names}")
        check(kind not in handlers, f"kwargs_handlers holds two {kind.__name__}: pass one")
        handlers[kind] = handler
    return handlers


class AllProcesses(Processes):
    """Process control with all of Accelerate's names."""

    @property
    def _sharded(self) -> bool:
        """Whether the run's strategy shards models; False without a run."""
        return False

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process of the run."""
        return self._world.rank == self._world.size - 1

    @property
    def use_distributed(self) -> bool:
        """Whether the run has several processes."""
        return self._world.size > 1

    @property
    def distributed_type(self) -> DistributedType:
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

    def on_last_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function to run on the last process only."""
        return run_where(lambda: self.is_last_process, function)

    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """Decorate a function to run on one process only."""
        _check_index("process_index", process_index, "the", self.num_processes)
        decorate = partial(run_where, lambda: self.process_index == process_index)
        return decorate if function is None else decorate(function)

    def on_local_process(self, function: Any = None, local_process_index: int | None = None) -> Any:
        """Decorate a function to run on one process of each node only."""
        _check_index("local_process_index", local_process_index, "a node's", self._world.local_size)
        decorate = partial(run_where, lambda: self.local_process_index == local_process_index)
        return decorate if function is None else decorate(function)


def _check_index(name: str, index: int | None, whose: str, size: int) -> None:
    if index is None or not 0 <= index < size:
        raise WorldError(f"{name}={index!r} is not one of {whose} {size} processes, 0 … {size - 1}")


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
        self,
        cpu: bool | None = None,
        *,
        backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | float | None = None,
    ) -> None:
        group = InitProcessGroupKwargs(backend, init_method, 120.0 if timeout is None else timeout)
        seconds = None if timeout is None else group.seconds
        if OPEN_RUNS:
            world = newest_run("PartialState").world
            check_backend(backend, world.device)
            if seconds not in (None, world.timeout):
                raise RefusedError(
                    f"PartialState(timeout={timeout!r}) in a run that is open with {world.timeout:g} seconds: make "
                    "this PartialState "
                    "before the Accelerator, or pass InitProcessGroupKwargs to that one"
                )
        self._world = current_world(cpu, backend, seconds)
        if cpu and self.device.type != "cpu":
            raise RefusedError(
                f"PartialState(cpu=True) in a run that is open on {self.device}: make it first, or pass cpu=True to "
                "the Accelerator"
            )

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave the other processes, if a PartialState joined them; an Accelerator does it in `end_training`.

        Args:
            group: makes no difference: the group of all processes is left.

        Example:
            >>> state = PartialState(cpu=True)
            >>> state.destroy_process_group()
        """
        close_runs(lambda run: run.world is self._world)


class AcceleratorState(View, AllProcesses):
    """The process and the plan of the open Accelerator."""

    def __init__(self) -> None:
        self._run = newest_run("AcceleratorState")
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
        """The `FullyShardedDataParallelPlugin` of a script of Accelerate on several processes; else None."""
        return getattr(self._run.accelerator(), "_fsdp_plugin", None)

    @property
    def deepspeed_plugin(self) -> None:
        """None, for scripts that ask: what DeepSpeed shards is strategy "zero1" or "fsdp" here."""
        return None


class GradientState(View):
    """The open run's place in its accumulation window and in the loop over its data."""

    plugin_kwargs: Mapping[str, Any] = MappingProxyType({})  # transformers' Trainer reads it
    adjust_scheduler: bool = True  # prepared schedulers count optimizer updates

    def __init__(self, window: UpdateWindow | None = None) -> None:
        self._window = window if window is not None else newest_run("GradientState").window

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
        loader: PreparedLoader | None = self._window.reading
        return loader

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
