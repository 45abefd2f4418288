"""What a checkpoint keeps of a run beside models, optimizers and the user's own objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import checkpoint
from ..distributed import World
from ..logging import get_logger
from ..options import ProjectConfiguration
from ..precision import Measured, Scaler
from ..training.state import Run

if TYPE_CHECKING:
    from ..optim.optimizer import PreparedOptimizer
    from ..optim.scheduler import PreparedScheduler
    from ..trackers.logbook import Logbook
    from .snapshot import Reading, Snapshot

logger = get_logger(__name__)


class LeftOut:
    """Something that a user's hook sees to."""

    def __init__(self, name: str) -> None:
        self._name = name

    def bring(self, into: Snapshot) -> None:
        """Nothing."""

    def take(self, source: Reading) -> Callable[[], None]:
        """Asks for it, so that nobody misses it, and takes nothing."""
        _ = self._name in source
        return lambda: None


class Owed:
    """What the rest of a loop's body would have done after a save between the optimizer's step and the schedule's: the latter.

    Only schedules that the script steps once an update, as its last call shows. One that it steps once an epoch will be stepped by it.
    """

    def __init__(self, schedulers: Sequence[PreparedScheduler]) -> None:
        self._schedulers = schedulers

    def bring(self, into: Snapshot) -> None:
        if into.rank == 0:
            into.add("state/each_update", [s.each_update for s in self._schedulers])

    def take(self, source: Reading) -> Callable[[], None]:
        here = [scheduler.each_update for scheduler in self._schedulers]
        each_update = source.state("state/each_update") if "state/each_update" in source else here
        checkpoint.check_like("state/each_update", each_update, here)

        def put() -> None:
            for scheduler, each in zip(self._schedulers, each_update):
                scheduler.each_update = each
                if each and any(scheduler.behind):
                    scheduler.step()

        return put


class Carried:
    """What compressed gradients leave behind on each rank (PowerSGD). Where a checkpoint has none for these ranks it begins anew."""

    def __init__(self, number: int, carried: Any, world: World) -> None:
        self._name, self._carried, self._world = f"state/carried_{number}", carried, world

    def bring(self, into: Snapshot) -> None:
        into.add(self._name, self._carried.state_dict(), own=True)

    def take(self, source: Reading) -> Callable[[], None]:
        if source.manifest.world_size != self._world.size or source.named(self._name, own=True) not in source:
            if self._world.rank == 0:
                logger.warning(
                    "PowerSGD begins anew, with gradients that travel whole: the checkpoint has no state of it for %d ranks",
                    self._world.size,
                )
            return lambda: None
        state = source.state(self._name, own=True)
        return lambda: self._carried.load_state_dict(state)


class Tracked:
    """Where the trackers stand, so that rows after the save are not logged twice; nothing where a run logs nothing."""

    NAME = "state/tracking"

    def __init__(self, logbook: Logbook) -> None:
        self._logbook = logbook

    def bring(self, into: Snapshot) -> None:
        state = self._logbook.state_dict() if into.rank == 0 else None
        if state is not None:
            into.add(self.NAME, state)

    def take(self, source: Reading) -> Callable[[], None]:
        if self.NAME not in source:
            return lambda: None
        state = source.state(self.NAME)
        return lambda: self._logbook.load_state_dict(state)


class Skipped:
    """Which optimizers' last step the loss scaler skipped: schedules may ask after the save."""

    def __init__(self, scaler: Scaler, optimizers: Sequence[PreparedOptimizer]) -> None:
        self._scaler, self._optimizers = scaler, optimizers

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": [optimizer.step_was_skipped for optimizer in self._optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, skipped in zip(self._optimizers, state["skipped"]):
            self._scaler.recall(optimizer.optimizer, skipped)


class RunState:
    """Accumulation, precision and the number of saves. Settings stay this run's; what differs from the saved run's is said.

    Args:
        precision: the run's; one that is still to be measured takes what the saved run had measured.
    """

    def __init__(self, run: Run, precision: Any, project: ProjectConfiguration) -> None:
        self._run, self._precision, self._project = run, precision, project

    def state_dict(self) -> dict[str, Any]:
        return {
            "accumulation": self._run.clock.accumulation,
            "precision": None if self._undecided() else self._precision.name,
            "iteration": self._project.iteration,
            "processes": self._run.world.size,
            "arithmetic": self._arithmetic(),
        }

    def _arithmetic(self) -> list[str]:
        """What decides in which order numbers are summed, beside what the plan says."""
        threads = torch.get_num_threads()
        words = [f"torch {torch.__version__}"]
        return (
            words
            if self._run.world.device.type != "cpu"
            else [*words, f"{threads} thread{'s' if threads > 1 else ''}"]
        )

    def _undecided(self) -> bool:
        return isinstance(self._precision, Measured) and self._precision.choice is None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._project.iteration = state["iteration"]
        saved, precision = state["precision"], self._precision
        if (
            saved is not None
            and not (self._undecided() and precision.follow(saved))
            and precision.name != saved
        ):
            logger.warning(
                "the checkpoint was saved in precision %s, and this run goes on in %s", saved, precision.name
            )
        then, now, world = state.get("arithmetic"), self._arithmetic(), self._run.world
        if then is not None and then != now and state["processes"] == world.size and world.rank == 0:
            logger.warning(
                "the checkpoint was saved with %s, and this run has %s: it goes on, but its last bits may differ from those of a run "
                "that was not interrupted",
                *(" and ".join(what) for what in (then, now)),
            )
        here = self._run.clock.accumulation
        if here != state["accumulation"]:
            logger.warning(
                "the checkpoint was saved with %d micro-batches an update, and this run has %d",
                state["accumulation"],
                here,
            )


def drawing_devices(run: Run, device: torch.device) -> list[torch.device]:
    """Accelerators whose random streams this process may use, its own first: all that it sees, where it is the only process."""
    if device.type == "cpu":
        return []
    count = (
        torch.get_device_module(device).device_count() if run.world.size == 1 and device.type != "mps" else 0
    )
    others: list[torch.device] = [
        torch.device(device.type, i) for i in range(count) if i != (device.index or 0)
    ]
    return [device, *others]
