"""The states of a run that a checkpoint holds, beside models and optimizers."""

from __future__ import annotations

import copy
import importlib
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..base.parts import Part
from ..base.rng import mix, seed_all
from ..distributed import World
from ..errors import CheckpointError, join_some
from ..logging import get_logger
from .load import ABSENT, CheckpointReader, Trial, check_like, is_known
from .manifest import canonical, check_number, per_rank
from .model_state import ModelState, OptimizerState
from .save import Saveable, Snapshot

if TYPE_CHECKING:
    from ..optim.optimizer import PreparedScheduler
    from ..protocols import Strategy
    from ..training.state import Run

logger = get_logger(__name__)
RANDOM = "state/random"
# Of torch's schedules.
LENGTHS = "total_steps T_max T_0 total_iters step_size milestones _milestones".split()


def numbered(word: str, number: int) -> str:
    """``"model"``, ``"model_1"`` and so on."""
    return f"{word}_{number}" if number else word


def items_of(
    run: Run, epochs: Any, registered: Sequence[Any], models: Collection[int], with_data: bool
) -> list[Saveable]:
    """Everything that a checkpoint holds, in the order of its loading; `models` are indices of those to save.

    A load without `with_data` leaves loaders and epochs where they are. Masters come after the parameters that they
    round to, and schedules after their optimizers. Nothing draws random numbers after the random streams.
    """
    prepared, scaler = run.prepared, run.scaler
    items: list[Saveable] = []
    owner: dict[int, str] = {}
    for i, model in enumerate(prepared.models):
        name, module = numbered("model", i), model.original
        owner |= {id(p): f"{name}/{canonical(n)}" for n, p in module.named_parameters()}
        items.append(ModelState(name, module, prepared.masters.keys()) if i in models else LeftOut(name))
    differs_by_rank = prepared.strategy.local_updates
    for i, optimizer in enumerate(prepared.optimizers):
        items.append(OptimizerState(numbered("optimizer", i), optimizer, owner, differs_by_rank))
    items += [ScheduleState(f"scheduler_{i}", scheduler) for i, scheduler in enumerate(prepared.schedulers)]
    items.append(ObjectState("scaler", scaler, saved=scaler.scales))
    for i, loader in enumerate(prepared.loaders):  # a seed may need 64 unsigned bits
        loader_state = ObjectState(f"loader_{i}", loader, free=("data set", "seed"))
        items.append(loader_state if with_data else LeftOut(f"state/loader_{i}"))
    items += [ObjectState(f"object_{i}", item, free=True) for i, item in enumerate(registered)]
    items.append(RunState(run, epochs, with_data))
    for part in run.parts.all:
        if type(part).state is not Part.state:
            items.append(PartState(f"state/{part.name}", part, part in run.parts.users))
    return [*items, RandomState(run.world, prepared.strategy, prepared.seed)]


class ObjectState:
    """The state of an object of rank 0 with `state_dict` and `load_state_dict`.

    Args:
        free: keys that may change their form from save to save; True for all.
        saved: whether a save holds it; None: it does, and a checkpoint must have it.
    """

    def __init__(self, name: str, target: Any, free: bool | Collection[str] = (), saved: bool | None = None) -> None:
        self.name, self._name, self._target = name, f"state/{name}", target
        self._free, self._saved = free, saved

    def collect(self, into: Snapshot) -> None:
        if into.rank == 0 and self._saved is not False:
            into.add(self._name, self._target.state_dict())

    def restore(self, source: CheckpointReader) -> Callable[[], None] | None:
        """A `load_state_dict` may fail, so it is a trial, which can be undone."""
        state, target = source.state(self._name, required=self._saved is None), self._target
        if state is ABSENT:
            return None
        previous: list[Any] = []
        with suppress(Exception):  # an object that cannot tell its state now may still load one
            previous.append(copy.deepcopy(target.state_dict()))
        if previous and not isinstance(self._free, bool):
            check_like(self._name, state, {key: v for key, v in previous[0].items() if key not in self._free})

        def undo() -> None:
            if not previous:
                raise CheckpointError("its former state could not be copied")
            target.load_state_dict(previous.pop())

        source.trials.append(Trial(self._name, lambda: target.load_state_dict(state), undo))
        return None


class ScheduleState(ObjectState):
    """A schedule's state, and the updates of its optimizers that it has not followed yet."""

    def __init__(self, name: str, scheduler: PreparedScheduler) -> None:
        super().__init__(name, scheduler, free=not is_known(scheduler.scheduler) or ())
        self._behind = f"{self._name}/behind"

    def collect(self, into: Snapshot) -> None:
        super().collect(into)
        if into.rank == 0:
            into.add(self._behind, self._target.behind)

    def restore(self, source: CheckpointReader) -> Callable[[], None] | None:
        super().restore(source)
        live_lengths = dict(lengths(self._target.state_dict()))
        for name, length in lengths(source.tree(self._name, required=False)):
            if live_lengths.get(name, length) != length:
                logger.warning(
                    f"{self.name}: {type(self._target.scheduler).__name__} continues with {name}={length} of the "
                    f"checkpoint, and not with {live_lengths[name]} of this script: a schedule keeps the length that "
                    "it was saved with. Set it after the load to change it"
                )
        behind = source.state(self._behind, required=False)
        if behind is ABSENT:
            return None
        check_like(self._behind, behind, self._target.behind)
        return lambda: setattr(self._target, "behind", behind)


def lengths(state: Any) -> Iterator[tuple[str, Any]]:
    """The lengths in the state of a schedule of torch, and of the schedules in it."""
    if isinstance(state, Mapping):
        yield from ((name, state[name]) for name in LENGTHS if name in state)
        for number, inner in enumerate(state.get("_schedulers") or ()):
            yield from ((f"_schedulers[{number}].{name}", value) for name, value in lengths(inner))


@dataclass(eq=False)
class LeftOut:
    """A placeholder for a state that a load does not change, such as that of a model that a user's hook loads."""

    _name: str

    def collect(self, into: Snapshot) -> None:
        pass

    def restore(self, source: CheckpointReader) -> Callable[[], None] | None:
        source.tree(self._name, required=False)  # so that it is not reported as left over
        return None


@dataclass(eq=False)
class PartState:
    """The state of a part, on rank 0; a checkpoint must have that of a part of the script."""

    _name: str
    _part: Part
    _is_of_script: bool

    def collect(self, into: Snapshot) -> None:
        if into.rank == 0 and (state := self._part.state()) is not None:
            into.add(self._name, dict(state))

    def restore(self, source: CheckpointReader) -> Callable[[], None] | None:
        state = source.state(self._name, required=False)
        if state is ABSENT:
            if self._is_of_script and self._part.state() is not None:
                source.complain(f"the checkpoint has no state of part {self._part.name!r}")
            return None
        return partial(self._part.load, state)


@dataclass(eq=False)
class RunState:
    """Skipped steps, pending steps of schedules, the order of the models, settings, and epochs of a run, on rank 0.

    Settings stay this run's; differences are logged. A load steps the schedules that the script steps after each
    update, but had not stepped when it saved.
    """

    _run: Run
    _epochs: Any
    _with_data: bool
    name: ClassVar[str] = "run"

    def _states(self) -> dict[str, Any]:
        run, prepared = self._run, self._run.prepared
        identities = [prepared.identities[id(model.original)] for model in prepared.models]
        threads = torch.get_num_threads()
        on_cpu = [f"{threads} thread{'s' if threads > 1 else ''}"] if run.world.device.type == "cpu" else []
        return {
            # Whether the loss scaler skipped each optimizer's last step, which schedules may ask for after the save.
            "state/steps": {"skipped": [optimizer.step_was_skipped for optimizer in prepared.optimizers]},
            # These tell models of one shape apart.
            "state/models": {
                "modules": [identity.modules for identity in identities],
                "first weights": [identity.first_weights for identity in identities],
            },
            "state/run": {
                "accumulation": run.window.accumulation,
                "precision": run.precision.name,
                "iteration": run.project.iteration,
                "processes": run.world.size,
                # Facts besides the plan that decide the order of sums.
                "arithmetic": [f"torch {torch.__version__}", *on_cpu],
            },
            "state/epochs": self._epochs.state_dict(),
            "state/each_update": [scheduler.each_update for scheduler in prepared.schedulers],
        }

    def collect(self, into: Snapshot) -> None:
        if into.rank == 0:
            for name, state in self._states().items():
                into.add(name, state)

    def restore(self, source: CheckpointReader) -> Callable[[], None] | None:
        live = self._states()
        saved = {path: source.state(path, path in ("state/steps", "state/run", "state/epochs")) for path in live}
        saved = {path: state for path, state in saved.items() if state is not ABSENT}
        for path, state in saved.items():
            check_like(path, state, live[path])
            facts = live[path].items() if isinstance(state, dict) else ()
            lacking = [key for key, value in facts if value is not None and state.get(key) is None]
            if lacking and lacking != ["arithmetic"]:  # which easymp 0.1 did not write
                raise CheckpointError(f"{path} lacks {', '.join(lacking)}: load another checkpoint")
        orders = saved.get("state/models", {}), live["state/models"]
        if orders[0] != orders[1] and (fault := _order_fault(*orders)):
            source.complain(fault)

        def load() -> None:
            run = self._run
            for optimizer, skipped in zip(run.prepared.optimizers, saved.get("state/steps", {}).get("skipped", ())):
                optimizer.turn.skipped = torch.tensor(float(skipped))
            if "state/run" in saved:
                run.project.iteration = saved["state/run"]["iteration"]
                _log_differences(saved["state/run"], live["state/run"], run.world.rank)
            if "state/epochs" in saved and self._with_data:
                self._epochs.load_state_dict(saved["state/epochs"])
            for scheduler, each_update in zip(run.prepared.schedulers, saved.get("state/each_update", ())):
                scheduler.each_update = each_update
                if each_update and any(scheduler.behind):
                    scheduler.step()

        return load


def _order_fault(saved: Mapping[str, list[str]], live: Mapping[str, list[str]]) -> str:
    """The error where the models were prepared in another order than those of the checkpoint, or ""."""
    for aspect, saved_marks in saved.items():
        live_marks = live[aspect]
        if saved_marks == live_marks or sorted(saved_marks) != sorted(live_marks):
            continue
        i = next(i for i, pair in enumerate(zip(saved_marks, live_marks)) if pair[0] != pair[1])
        name, live_name = numbered("model", i), numbered("model", live_marks.index(saved_marks[i]))
        return (
            f"the models were prepared in another order: {name!r} of the checkpoint ({aspect} {saved_marks[i]}) is "
            f"{live_name!r} here, and {name!r} here has {aspect} {live_marks[i]}. Pass models to prepare() in the "
            "order of the run that saved"
        )
    return ""


def _log_differences(saved: Mapping[str, Any], live: Mapping[str, Any], rank: int) -> None:
    if saved["precision"] is not None and saved["precision"] != live["precision"]:
        message = "the checkpoint was saved in precision %s, and this run goes on in %s"
        logger.warning(message, saved["precision"], live["precision"])
    arithmetic = saved.get("arithmetic", live["arithmetic"])
    if arithmetic != live["arithmetic"] and saved["processes"] == live["processes"] and rank == 0:
        message = "the checkpoint was saved with %s, and this run has %s: its last bits may differ"
        logger.warning(message, " and ".join(arithmetic), " and ".join(live["arithmetic"]))
    if saved["accumulation"] != live["accumulation"]:
        message = "the checkpoint was saved with %d micro-batches an update, and this run has %d"
        logger.warning(message, saved["accumulation"], live["accumulation"])


class RandomState:
    """The random streams of this rank: Python's, NumPy's and torch's.

    Ranks that share their data share their stream (tensor parallelism needs the same dropout), so on another layout of
    ranks a stream is looked up by its slice of the data.
    """

    def __init__(self, world: World, strategy: Strategy, seed: int) -> None:
        self._rank, self._size = world.rank, world.size
        self._data_rank, self._data_size, self._seed = strategy.data_rank, strategy.data_size, seed
        # Accelerators with random streams of this process, its own first; all visible ones if it is the only process.
        device = world.device
        self._devices = [device] if device.type != "cpu" else []
        if self._devices and world.size == 1 and device.type != "mps":
            count = torch.get_device_module(device).device_count()
            self._devices += [torch.device(device.type, i) for i in range(count) if i != (device.index or 0)]

    def collect(self, into: Snapshot) -> None:
        slices = {"data_rank": self._data_rank, "data_size": self._data_size, "seed": self._seed}
        into.add(RANDOM, {**slices, "streams": _streams(self._devices)}, own=True)

    def restore(self, source: CheckpointReader) -> Callable[[], None] | None:
        size, states, step = source.manifest.world_size, source.manifest.states, source.manifest.step
        names = {rank: per_rank(rank, RANDOM) for rank in range(size)}
        saved = {rank: states[name] for rank, name in names.items() if name in states}
        if len(saved) < size:
            source.complain(f"the checkpoint has the random streams of {len(saved)} of its {size} ranks")
        slices = {"data_rank": self._data_rank, "data_size": self._data_size}
        for rank, state in saved.items():
            check_like(f"{RANDOM} of rank {rank}", {key: state[key] for key in slices}, slices)
            check_number(f"the seed of rank {rank}", state["seed"], -(2**63), 2**64 - 1)
        seed = next((state["seed"] for state in saved.values()), self._seed)

        def derive() -> None:
            seed_all(mix(seed, "rank", self._data_rank, "step", step))

        by_slice = {state["data_rank"]: rank for rank, state in reversed(saved.items())}
        new_slices = [str(i) for i in range(self._data_size) if saved and i not in by_slice]
        if new_slices:
            logger.warning(
                "random streams: %d of %d slices of the data have none in the checkpoint (%s); theirs are derived from "
                "the seed",
                len(new_slices),
                self._data_size,
                join_some(new_slices, ", "),
            )
        rank_to_follow = by_slice.get(self._data_rank)
        own = saved.get(self._rank)
        if size == self._size and own is not None and own["data_rank"] == self._data_rank:
            rank_to_follow = self._rank
        if rank_to_follow is None:
            return derive
        streams = source.state(names[rank_to_follow])["streams"]
        check_like(f"{RANDOM}['streams']", streams, _streams(self._devices))
        words, cpu = streams["python"]["words"], streams["torch"]
        if words.shape != (625,) or (cpu.shape, cpu.dtype) != (torch.get_rng_state().shape, torch.uint8):
            raise CheckpointError("the checkpoint's random streams are of another Python or torch")

        def load() -> None:
            if self._devices and self._devices[0].type not in streams["devices"]:
                derive()  # saved on another kind of device: this one's stream begins here
            _set_streams(streams, self._devices)

        return load


def _streams(devices: Sequence[torch.device]) -> dict[str, Any]:
    """The random states of this process: Python's, NumPy's if it is loaded, torch's on CPU and `devices`."""
    version, words, gauss = random.getstate()
    streams: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "torch": torch.get_rng_state(),
        "devices": {},
    }
    for device in devices:
        state = torch.get_device_module(device).get_rng_state(*_arguments(device))
        streams["devices"].setdefault(device.type, []).append(state.cpu())
    if numpy := sys.modules.get("numpy"):
        kind, key, *position = numpy.random.get_state()
        streams["numpy"] = {"kind": kind, "words": torch.tensor(key.tolist()), "rest": position}
    return streams


def _set_streams(streams: dict[str, Any], devices: Sequence[torch.device]) -> None:
    """Restore the random states that `_streams` gave. Devices come in the same order."""
    python = streams["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    if "numpy" in streams:
        numpy = importlib.import_module("numpy")  # it was loaded then, and will be
        state = streams["numpy"]
        words = numpy.array(state["words"].tolist(), dtype=numpy.uint32)
        numpy.random.set_state((state["kind"], words, *state["rest"]))
    torch.set_rng_state(streams["torch"])
    for device, state in zip(devices, streams["devices"].get(devices[0].type, []) if devices else []):
        torch.get_device_module(device).set_rng_state(state, *_arguments(device))


def _arguments(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # there is only one, and its functions take none
