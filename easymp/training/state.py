"""The open run, for code that has no Accelerator at hand. The classes are views without state of their own.

Accelerators register here when they open and leave when they close, so one can be made after another.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch

from .. import hardware
from ..base.accumulation import UpdateWindow
from ..data import PreparedLoader
from ..distributed import World, check_backend, locate, read_ranks
from ..distributed.processes import Processes
from ..errors import RefusedError, StepError
from ..options import InitProcessGroupKwargs
from ..plan import Plan, make_plan
from ..registry import PrecisionName, reported
from ..settings import resolve
from ..strategies import STRATEGIES


@dataclass(slots=True)
class Run:
    """The world, plan and window of an open Accelerator, or of a PartialState made without one; `accelerator()` is None then."""

    world: World
    plan: Plan
    window: UpdateWindow
    accelerator: Callable[[], Any] = lambda: None


_open: list[Run] = []


def register(run: Run) -> None:
    """Add an open run; views show the newest one."""
    _open.append(run)


def unregister(run: Run) -> None:
    _open[:] = [other for other in _open if other is not run]


def accelerators() -> list[Any]:
    """The open ones."""
    return [there for run in _open if (there := run.accelerator()) is not None]


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
    return _open[-1].world


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

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Do nothing: a view has no state, and its run ends with the Accelerator."""


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
            world = _open[-1].world
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
        for run in [run for run in _open if run.world is self._world and run.accelerator() is None]:
            unregister(run)
            run.world.close()


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

    Attributes:
        adjust_scheduler: always True: prepared schedulers count optimizer updates.

    Raises:
        StepError: no Accelerator is open.

    Example:
        >>> acc = Accelerator(cpu=True, gradient_accumulation_steps=2)
        >>> state = GradientState()
        >>> state.num_steps, state.sync_gradients, state.sync_with_dataloader
        (2, True, True)
        >>> for batch in acc.prepare(torch.utils.data.DataLoader(range(2))):
        ...     print(batch, state.in_dataloader, state.end_of_dataloader, state.active_dataloader.batch_size, state.remainder)
        tensor([0]) True False 1 -1
        tensor([1]) True True 1 -1
    """

    plugin_kwargs: Mapping[str, Any] = MappingProxyType(
        {}
    )  # transformers' Trainer asks for "sync_each_batch"
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
        """Samples in the last global batch that are not repeated ones; -1 where none are, or before that batch."""
        loader = self._window.reading
        return -1 if loader is None else loader.remainder


def _newest(what: str) -> Run:
    if not _open:
        raise StepError(f"{what}() needs an open Accelerator: make one first")
    return _open[-1]
