"""What a checkpoint keeps of a run beside models, optimizers and the user's own objects."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import checkpoint
from ..base.rng import mix, seed_all
from ..distributed import World
from ..errors import CheckpointError
from ..logging import get_logger
from ..optim import PreparedOptimizer, PreparedScheduler
from ..options import ProjectConfiguration
from ..precision import Measured, Scaler
from ..training.state import Run
from .load import Reading, check_like
from .manifest import check_number
from .model_state import ModelState, OptimizerState
from .objects import ScaleState, ScheduleState
from .snapshot import Kept, Snapshot
from .source import canonical

if TYPE_CHECKING:
    from ..optim.optimizer import PreparedOptimizer, PreparedScheduler
    from ..trackers.logbook import Logbook
    from .load import Reading
    from .snapshot import Snapshot

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


# -- The random streams of each rank in a checkpoint.
NAME = "state/random"


class RandomState:
    """Python's, NumPy's and torch's streams of this rank.

    The same number of ranks with the same slices of the data go on exactly. A slice of the data that no rank had before (a larger
    world) gets a stream f(seed, slice, step), and a line in the log says so.

    Args:
        devices: accelerators of this process that draw; its own first.
        data_rank, data_size: which slice of the data this rank sees, of how many.
        seed: the run's, the same on all ranks.
    """

    def __init__(
        self, rank: int, size: int, devices: Sequence[torch.device], data_rank: int, data_size: int, seed: int
    ) -> None:
        self._rank, self._size, self._devices = rank, size, [d for d in devices if d.type != "cpu"]
        self._data_rank, self._data_size, self._seed = data_rank, data_size, seed

    def bring(self, into: Snapshot) -> None:
        slices = {"data_rank": self._data_rank, "data_size": self._data_size, "seed": self._seed}
        into.add(NAME, {**slices, "streams": states(self._devices)}, own=True)

    def take(self, source: Reading) -> Callable[[], None]:
        size, states_of = source.manifest.world_size, source.manifest.states
        kept = {
            rank: states_of[name] for rank in range(size) if (name := f"ranks/{rank:05d}/{NAME}") in states_of
        }
        if len(kept) < size:
            source.complain(f"the checkpoint has the random streams of {len(kept)} of its {size} ranks")
        slices = {"data_rank": self._data_rank, "data_size": self._data_size}
        for rank, saved in kept.items():
            check_like(f"{NAME} of rank {rank}", {key: saved[key] for key in slices}, slices)
            check_number(
                f"the seed of rank {rank}", saved["seed"], -(2**63), 2**64 - 1
            )  # torch's own are unsigned
        step = source.manifest.step
        if not kept:
            return lambda: seed_all(mix(self._seed, "rank", self._data_rank, "step", step))
        mine = self._choose(kept, size)
        seed = next(iter(kept.values()))["seed"]
        self._say(kept)
        if mine is None:
            return lambda: seed_all(mix(seed, "rank", self._data_rank, "step", step))
        found = source.state(f"ranks/{mine:05d}/{NAME}")["streams"]
        check_like(f"{NAME}['streams']", found, states(self._devices))
        self._check(found)

        def put() -> None:
            fresh = self._devices and self._devices[0].type not in found["devices"]
            if fresh:  # of another kind of device: this one's stream begins here
                seed_all(mix(seed, "rank", self._data_rank, "step", step))
            put_states(found, self._devices)

        return put

    def _choose(self, kept: dict[int, Any], size: int) -> int | None:
        """The rank of the saved run whose stream this one goes on with."""
        own = kept.get(self._rank)
        if size == self._size and own is not None and own["data_rank"] == self._data_rank:
            return self._rank
        return next((rank for rank, saved in kept.items() if saved["data_rank"] == self._data_rank), None)

    def _say(self, kept: dict[int, Any]) -> None:
        known = {saved["data_rank"] for saved in kept.values()}
        fresh = [str(i) for i in range(self._data_size) if i not in known]
        if fresh:
            logger.warning(
                "random streams: %d of %d slices of the data have none in the checkpoint (%s); theirs are derived from the seed",
                *(len(fresh), self._data_size, ", ".join(fresh[:8]) + (" …" if len(fresh) > 8 else "")),
            )

    def _check(self, found: dict[str, Any]) -> None:
        """So that `put_states` does not fail."""
        words = found["python"]["words"]
        if (
            words.shape != (625,)
            or found["torch"].shape != torch.get_rng_state().shape
            or found["torch"].dtype != torch.uint8
        ):
            raise CheckpointError(
                "the checkpoint's random streams are of another version of Python or torch; strict=False is no help here"
            )


# -- What a checkpoint keeps of a training: models, the optimizers that step them, their schedulers, the loss scale.


def numbered(word: str, number: int) -> str:
    """``"model"``, ``"model_1"`` …"""
    return f"{word}_{number}" if number else word


def kept_of(
    models: Sequence[nn.Module],
    optimizers: Sequence[PreparedOptimizer],
    schedulers: Sequence[PreparedScheduler],
    scaler: Scaler,
    mastered: Collection[int] = (),
    apart: bool = False,
) -> list[Kept]:
    """In the order in which it is put back: masters after the parameters that they round to, schedules after what they count.

    Args:
        models: the user's own modules, as a strategy left them.
        mastered: ids of parameters that have masters.
        apart: whether optimizers remember something else on each rank.
    """
    names = [numbered("model", i) for i in range(len(models))]
    owner = {
        id(p): f"{name}/{canonical(n)}"
        for name, model in zip(names, models)
        for n, p in model.named_parameters()
    }
    return [
        *(ModelState(name, model, mastered) for name, model in zip(names, models)),
        *(
            OptimizerState(numbered("optimizer", i), optimizer, owner, apart)
            for i, optimizer in enumerate(optimizers)
        ),
        *(ScheduleState(f"scheduler_{i}", scheduler) for i, scheduler in enumerate(schedulers)),
        ScaleState(scaler),
    ]


# -- Where a process's random streams stand, as words, numbers and tensors, and back.


def states(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Where this process's streams stand: Python's, NumPy's where it is loaded, torch's on the CPU and on accelerators `devices`.

    Words, numbers and tensors only.
    """
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "torch": torch.get_rng_state(),
        "devices": {
            device.type: [_device_state(d) for d in devices if d.type == device.type] for device in devices
        },
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, key, place, has_gauss, cached = numpy.random.get_state()
        found["numpy"] = {
            "kind": kind,
            "words": torch.tensor(key.tolist()),
            "rest": [place, has_gauss, cached],
        }
    return found


def put_states(found: dict[str, Any], devices: Sequence[torch.device]) -> None:
    """Let this process's streams go on where `found`, from `states`, was taken. Devices come in the same order."""
    python = found["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    if "numpy" in found:
        numpy = importlib.import_module("numpy")  # it was loaded then, and will be
        kept = found["numpy"]
        numpy.random.set_state(
            (kept["kind"], numpy.array(kept["words"].tolist(), dtype=numpy.uint32), *kept["rest"])
        )
    torch.set_rng_state(found["torch"])
    for device, state in zip(devices, found["devices"].get(devices[0].type, []) if devices else []):
        _rng(device).set_rng_state(state, *_place(device))


def _device_state(device: torch.device) -> torch.Tensor:
    state: torch.Tensor = _rng(device).get_rng_state(*_place(device))
    return state.cpu()


def _rng(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _place(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # there is but one, and its functions take none
