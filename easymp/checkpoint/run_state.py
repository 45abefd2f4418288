"""The parts of a run that a checkpoint keeps, beside models and optimizers: objects, schedules, the loss scale, random streams.

Each part has `collect`, which adds its state to a `Snapshot`, and `restore`, which reads it from a `Reading`, checks it, and returns
a function that puts it in place. So a load changes nothing before all parts have been checked.
"""

from __future__ import annotations

import copy
import importlib
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from ..base.rng import mix, seed_all
from ..distributed import World
from ..errors import CheckpointError
from ..logging import get_logger
from ..precision import Measured, Scaler
from .load import Reading, Trial, check_like, is_known
from .manifest import canonical, check_number
from .model_state import ModelState, OptimizerState, leave
from .snapshot import Kept, Snapshot

if TYPE_CHECKING:
    from ..optim.optimizer import PreparedOptimizer, PreparedScheduler
    from ..options import ProjectConfiguration
    from ..protocols import Strategy
    from ..trackers.logbook import Logbook
    from ..training.prepare import Preparation
    from ..training.state import Run

logger = get_logger(__name__)
RANDOM = "state/random"
# Of torch's schedules.
LENGTHS = "total_steps T_max T_0 total_iters step_size milestones _milestones".split()


def numbered(word: str, number: int) -> str:
    """``"model"``, ``"model_1"`` and so on."""
    return f"{word}_{number}" if number else word


def parts(
    run: Run,
    prepared: Preparation,
    scaler: Scaler,
    precision: Any,
    project: ProjectConfiguration,
    epochs: Any,
    registered: Sequence[Any],
    logbook: Logbook,
    guard: Any,
    models: Collection[int],
) -> list[Kept]:
    """Everything that a checkpoint keeps, in the order in which it is restored; `models` are indices of those that no hook saves.

    Masters come after the parameters that they round to, schedules after their optimizers, and random streams last: nothing draws after.
    """
    world, optimizers, schedulers = run.world, prepared.optimizers, prepared.schedulers
    found: list[Kept] = []
    owner: dict[int, str] = {}
    for i, model in enumerate(prepared.models):
        name, module = numbered("model", i), model.original
        owner |= {id(p): f"{name}/{canonical(n)}" for n, p in module.named_parameters()}
        found.append(ModelState(name, module, prepared.masters.keys()) if i in models else LeftOut(name))
    own = prepared.strategy.local_updates
    found += [OptimizerState(numbered("optimizer", i), o, owner, own) for i, o in enumerate(optimizers)]
    found += [ScheduleState(f"scheduler_{i}", scheduler) for i, scheduler in enumerate(schedulers)]
    found.append(ObjectState("scaler", scaler, kept=scaler.scales))
    for i, loader in enumerate(prepared.loaders):  # a seed may need 64 unsigned bits
        found.append(ObjectState(f"loader_{i}", loader, free=("data set", "seed")))
    found += [ObjectState(f"object_{i}", item, free=True) for i, item in enumerate(registered)]
    found.append(ObjectState("steps", SkippedSteps(scaler, optimizers)))
    found.append(ObjectState("run", RunState(run, precision, project)))
    found.append(ObjectState("epochs", epochs))
    found.append(ObjectState("guard", guard, free=True, kept=guard.used))
    alive = [carried for carried in world.carried if carried.alive]
    found += [CarriedState(i, carried, world) for i, carried in enumerate(alive)]
    random_state = RandomState(world, prepared.strategy, prepared.seed)
    return [*found, PendingSchedules(schedulers), TrackerState(logbook), random_state]


class ObjectState:
    """The state of an object with `state_dict` and `load_state_dict`, of rank 0.

    `free` are keys that may change their form from save to save, True for all (a user's own object); the rest is compared with the live
    state. `kept`: whether a save keeps it; None: it does, and a checkpoint must have it.
    """

    def __init__(
        self, name: str, thing: Any, free: bool | Collection[str] = (), kept: bool | None = None
    ) -> None:
        self.name, self._name, self._thing, self._free, self._kept = name, f"state/{name}", thing, free, kept

    def collect(self, into: Snapshot) -> None:
        if into.rank == 0 and self._kept is not False:
            into.add(self._name, self._thing.state_dict())

    def restore(self, source: Reading) -> Callable[[], None]:
        """A `load_state_dict` may fail, so it is a trial, which can be undone."""
        if self._name not in source:
            if self._kept is None:
                source.complain(f"the checkpoint has no {self._name}")
            return leave
        state = source.state(self._name)
        before: list[Any] = []
        with suppress(Exception):  # an object that cannot tell its state now may still load one
            before.append(copy.deepcopy(self._thing.state_dict()))
        if before and not isinstance(self._free, bool):
            live = {key: value for key, value in before[0].items() if key not in self._free}
            check_like(self._name, state, live)

        def undo() -> None:
            if not before:
                raise CheckpointError("its former state could not be copied")
            self._thing.load_state_dict(before.pop())

        source.trials.append(Trial(self._name, lambda: self._thing.load_state_dict(state), undo))
        return leave


class ScheduleState(ObjectState):
    """A schedule's state, and the updates of its optimizers that it has not followed yet."""

    def __init__(self, name: str, scheduler: PreparedScheduler) -> None:
        super().__init__(name, scheduler, free=not is_known(scheduler.scheduler) or ())
        self._behind = f"{self._name}/behind"
        self._kind = type(scheduler.scheduler).__name__

    def collect(self, into: Snapshot) -> None:
        super().collect(into)
        if into.rank == 0:
            into.add(self._behind, self._thing.behind)

    def restore(self, source: Reading) -> Callable[[], None]:
        super().restore(source)
        if self._name in source:
            self._compare_lengths(source.state(self._name))
        if self._behind not in source:
            return leave
        behind = source.state(self._behind)
        check_like(self._behind, behind, self._thing.behind)
        return lambda: setattr(self._thing, "behind", behind)

    def _compare_lengths(self, saved: Any) -> None:
        here = dict(lengths(self._thing.state_dict()))
        for name, at in lengths(saved):
            if here.get(name, at) != at:
                logger.warning(
                    f"{self.name}: {self._kind} continues with {name}={at} of the checkpoint, and not with {here[name]} of this script: a "
                    "schedule keeps the length that it was saved with. Set it after the load to change it"
                )


def lengths(state: Any) -> Iterator[tuple[str, Any]]:
    """What the state of a schedule of torch says about its length, and those of the schedules in it."""
    if isinstance(state, Mapping):
        yield from ((name, state[name]) for name in LENGTHS if name in state)
        for number, inner in enumerate(state.get("_schedulers") or ()):
            yield from ((f"_schedulers[{number}].{name}", value) for name, value in lengths(inner))


class LeftOut:
    """A placeholder for what a load leaves as it is, such as a model that a user's hook saves and loads."""

    def __init__(self, name: str) -> None:
        self._name = name

    def collect(self, into: Snapshot) -> None:
        """Nothing."""

    def restore(self, source: Reading) -> Callable[[], None]:
        _ = self._name in source  # asked for, so that it is not reported as left over
        return leave


def without_data(part: Kept) -> Kept:
    """`part`, or a placeholder for the position of a loader or of the epochs."""
    name = getattr(part, "name", "")
    return LeftOut(f"state/{name}") if name == "epochs" or name.startswith("loader_") else part


class PendingSchedules:
    """Schedules that the script steps after each update, but had not stepped when it saved: loading steps them."""

    NAME = "state/each_update"

    def __init__(self, schedulers: Sequence[PreparedScheduler]) -> None:
        self._schedulers = schedulers

    def collect(self, into: Snapshot) -> None:
        if into.rank == 0:
            into.add(self.NAME, [s.each_update for s in self._schedulers])

    def restore(self, source: Reading) -> Callable[[], None]:
        here = [scheduler.each_update for scheduler in self._schedulers]
        each_update = source.state(self.NAME) if self.NAME in source else here
        check_like(self.NAME, each_update, here)

        def put() -> None:
            for scheduler, each in zip(self._schedulers, each_update):
                scheduler.each_update = each
                if each and any(scheduler.behind):
                    scheduler.step()

        return put


class CarriedState:
    """The residuals of compressed gradients (PowerSGD) on each rank. Ranks without saved residuals start with zeros."""

    def __init__(self, number: int, carried: Any, world: World) -> None:
        self._name, self._carried, self._world = f"state/carried_{number}", carried, world

    def collect(self, into: Snapshot) -> None:
        into.add(self._name, self._carried.state_dict(), own=True)

    def restore(self, source: Reading) -> Callable[[], None]:
        world = self._world
        if source.manifest.world_size == world.size and source.named(self._name, own=True) in source:
            state = source.state(self._name, own=True)
            return lambda: self._carried.load_state_dict(state)
        if world.rank == 0:
            words = "PowerSGD begins anew, with gradients that travel whole: the checkpoint has no state of it for %d ranks"
            logger.warning(words, world.size)
        return leave


class TrackerState:
    """The positions of the trackers, so that rows after the save are not logged twice."""

    NAME = "state/tracking"

    def __init__(self, logbook: Logbook) -> None:
        self._logbook = logbook

    def collect(self, into: Snapshot) -> None:
        if into.rank == 0 and (state := self._logbook.state_dict()) is not None:
            into.add(self.NAME, state)

    def restore(self, source: Reading) -> Callable[[], None]:
        if self.NAME not in source:
            return leave
        state = source.state(self.NAME)
        return lambda: self._logbook.load_state_dict(state)


class SkippedSteps:
    """Whether the loss scaler skipped each optimizer's last step, which schedules may ask for after the save."""

    def __init__(self, scaler: Scaler, optimizers: Sequence[PreparedOptimizer]) -> None:
        self._scaler, self._optimizers = scaler, optimizers

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": [optimizer.step_was_skipped for optimizer in self._optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, skipped in zip(self._optimizers, state["skipped"]):
            self._scaler.recall(optimizer.optimizer, skipped)


class RunState:
    """Accumulation, precision, number of saves. Settings stay this run's, but for a precision not yet measured; differences are logged."""

    def __init__(self, run: Run, precision: Any, project: ProjectConfiguration) -> None:
        self._run, self._precision, self._project = run, precision, project

    def state_dict(self) -> dict[str, Any]:
        return {
            "accumulation": self._run.window.accumulation,
            "precision": None if self._undecided() else self._precision.name,
            "iteration": self._project.iteration,
            "processes": self._run.world.size,
            "arithmetic": self._arithmetic(),
        }

    def _arithmetic(self) -> list[str]:
        """Facts besides the plan that decide the order of sums."""
        threads, on_cpu = torch.get_num_threads(), self._run.world.device.type == "cpu"
        counted = [f"{threads} thread{'s' if threads > 1 else ''}"] if on_cpu else []
        return [f"torch {torch.__version__}", *counted]

    def _undecided(self) -> bool:
        return isinstance(self._precision, Measured) and self._precision.choice is None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._project.iteration = state["iteration"]
        saved, precision, world = state["precision"], self._precision, self._run.world
        followed = saved is not None and self._undecided() and precision.follow(saved)
        if saved is not None and not followed and precision.name != saved:
            words = "the checkpoint was saved in precision %s, and this run goes on in %s"
            logger.warning(words, saved, precision.name)
        then, now = state.get("arithmetic"), self._arithmetic()
        if then is not None and then != now and state["processes"] == world.size and world.rank == 0:
            words = "the checkpoint was saved with %s, and this run has %s: its last bits may differ from an uninterrupted one's"
            logger.warning(words, " and ".join(then), " and ".join(now))
        if (here := self._run.window.accumulation) != state["accumulation"]:
            words = "the checkpoint was saved with %d micro-batches an update, and this run has %d"
            logger.warning(words, state["accumulation"], here)


class RandomState:
    """The random streams of this rank: Python's, NumPy's and torch's.

    Ranks that share their data share their stream (tensor parallelism needs the same dropout), so on another layout of ranks a stream is
    found by its slice of the data. A slice that no rank had gets a stream f(seed, slice, step), with a line in the log.
    """

    def __init__(self, world: World, spread: Strategy, seed: int) -> None:
        self._rank, self._size, self._devices = world.rank, world.size, _drawing_devices(world)
        self._data_rank, self._data_size, self._seed = spread.data_rank, spread.data_size, seed

    def collect(self, into: Snapshot) -> None:
        slices = {"data_rank": self._data_rank, "data_size": self._data_size, "seed": self._seed}
        into.add(RANDOM, {**slices, "streams": _streams(self._devices)}, own=True)

    def restore(self, source: Reading) -> Callable[[], None]:
        size, states, step = source.manifest.world_size, source.manifest.states, source.manifest.step
        names = {rank: f"ranks/{rank:05d}/{RANDOM}" for rank in range(size)}
        kept = {rank: states[name] for rank, name in names.items() if name in states}
        if len(kept) < size:
            source.complain(f"the checkpoint has the random streams of {len(kept)} of its {size} ranks")
        slices = {"data_rank": self._data_rank, "data_size": self._data_size}
        for rank, saved in kept.items():
            check_like(f"{RANDOM} of rank {rank}", {key: saved[key] for key in slices}, slices)
            check_number(f"the seed of rank {rank}", saved["seed"], -(2**63), 2**64 - 1)
        seed = next((saved["seed"] for saved in kept.values()), self._seed)

        def derive() -> None:
            seed_all(mix(seed, "rank", self._data_rank, "step", step))

        if kept:
            self._log_new_slices({saved["data_rank"] for saved in kept.values()})
        mine = self._rank_to_follow(kept, size)
        if mine is None:
            return derive
        found = source.state(names[mine])["streams"]
        check_like(f"{RANDOM}['streams']", found, _streams(self._devices))
        words, cpu = found["python"]["words"], found["torch"]
        if words.shape != (625,) or (cpu.shape, cpu.dtype) != (torch.get_rng_state().shape, torch.uint8):
            raise CheckpointError("the checkpoint's random streams are of another Python or torch")

        def put() -> None:
            if self._devices and self._devices[0].type not in found["devices"]:
                derive()  # saved on another kind of device: this one's stream begins here
            _put_streams(found, self._devices)

        return put

    def _rank_to_follow(self, kept: dict[int, Any], size: int) -> int | None:
        """The rank of the saved run whose streams this rank continues."""
        own = kept.get(self._rank)
        if size == self._size and own is not None and own["data_rank"] == self._data_rank:
            return self._rank
        return next((rank for rank, saved in kept.items() if saved["data_rank"] == self._data_rank), None)

    def _log_new_slices(self, known: Collection[int]) -> None:
        fresh = [str(i) for i in range(self._data_size) if i not in known]
        if fresh:
            logger.warning(
                "random streams: %d of %d slices of the data have none in the checkpoint (%s); theirs are derived from the seed",
                *(len(fresh), self._data_size, ", ".join(fresh[:8]) + (" …" if len(fresh) > 8 else "")),
            )


# What has a part on each rank although models are whole.
OF_EACH_RANK = (OptimizerState, CarriedState, RandomState)


def _drawing_devices(world: World) -> list[torch.device]:
    """Accelerators with random streams of this process, its own first; all visible ones if it is the only process."""
    device = world.device
    if device.type == "cpu":
        return []
    alone = world.size == 1 and device.type != "mps"
    count = torch.get_device_module(device).device_count() if alone else 0
    return [device, *(torch.device(device.type, i) for i in range(count) if i != (device.index or 0))]


def _streams(devices: Sequence[torch.device]) -> dict[str, Any]:
    """The random states of this process: Python's, NumPy's if it is loaded, torch's on the CPU and on accelerators `devices`."""
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "torch": torch.get_rng_state(),
        "devices": {},
    }
    for device in devices:
        state = torch.get_device_module(device).get_rng_state(*_arguments(device))
        found["devices"].setdefault(device.type, []).append(state.cpu())
    if numpy := sys.modules.get("numpy"):
        kind, key, *rest = numpy.random.get_state()
        found["numpy"] = {"kind": kind, "words": torch.tensor(key.tolist()), "rest": rest}
    return found


def _put_streams(found: dict[str, Any], devices: Sequence[torch.device]) -> None:
    """Restore the random states that `_streams` gave. Devices come in the same order."""
    python = found["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    if "numpy" in found:
        numpy = importlib.import_module("numpy")  # it was loaded then, and will be
        kept = found["numpy"]
        words = numpy.array(kept["words"].tolist(), dtype=numpy.uint32)
        numpy.random.set_state((kept["kind"], words, *kept["rest"]))
    torch.set_rng_state(found["torch"])
    for device, state in zip(devices, found["devices"].get(devices[0].type, []) if devices else []):
        torch.get_device_module(device).set_rng_state(state, *_arguments(device))


def _arguments(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # there is only one, and its functions take none
