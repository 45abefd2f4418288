"""`Accelerator.profile`: torch.profiler around a run, with the phases of its steps."""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerAction, ProfilerActivity, record_function

from ..base import env
from ..base.dtensor import local
from ..base.units import size
from ..distributed import World
from ..errors import RefusedError, SettingError, StepError
from ..logging import get_logger
from ..options import ProfileKwargs, activity_word
from . import breakdown
from .breakdown import BACKWARD, COMMUNICATION, DATA, FORWARD, NO_GRAD, OPTIMIZER, PREFIX, STEP, Breakdown

logger = get_logger(__name__)

# Without ProfileKwargs the first step is recorded, because it may be the only one. If the third is complete, the third to fifth take
# its place, after one that warms up.
TRIAL = 0
WARMUP, FIRST, LAST = 1, 2, 4
QUIET = "99"  # kineto's level of messages; by default it writes two lines a recording
AS_TORCH = ("on_trace_ready", "record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")
NAME_ONE = "name a folder with ProfileKwargs(output_trace_dir=...)"
PATIENCE = 10.0  # seconds that the first rank waits for the results of the others

Target = tuple[Any, str, str]  # an object, its method, and the phase of that method
CALL = "_compiled_call_impl"  # the attribute of a module that its call runs, where it is set


class Profile(torch.profiler.profile):
    """A torch.profiler.profile that knows the phases of a training step, writes its traces, and shows in words where the time went.

    Steps are counted automatically: one begins when the outermost prepared loader is asked for its next batch, under accumulation at
    the beginning of a window. From the first `step` that the script calls itself, only its calls count.

    Args:
        accelerator, run, prepared: the training, and its prepared models, optimizers and loaders.
        how: what to record, and when; None: memory too, and the third to fifth step; the first one if there are not as many; the whole
            block if there are no steps.

    Attributes:
        traces: the files that this rank has written: Chrome's format, for Perfetto and chrome://tracing.
        breakdown: the time of this rank's recorded steps by phase; once the block is over.
        ranks: the breakdowns of all ranks that took part, on the first of them; on the others, their own.
    """

    def __init__(self, accelerator: Any, run: Any, prepared: Any, how: ProfileKwargs | None = None) -> None:
        self._world, self._window, self._prepared, self._free = run.world, run.window, prepared, how is None
        how = how or ProfileKwargs(profile_memory=True)
        self._output, self._project = how.output_trace_dir, accelerator.project_dir
        schedule: Any = _three_steps if self._free else None
        if how.schedule_option is not None:
            schedule = torch.profiler.schedule(**{"wait": 0, "warmup": 0, **how.schedule_option})
        super().__init__(
            activities=_activities(how), schedule=schedule, **{name: getattr(how, name) for name in AS_TORCH}
        )
        self.record_steps = True  # without a schedule, too
        self._over_after = LAST if self._free else _last_step(how.schedule_option)
        self._by_hand = self._going = self._failed = False
        self._complete: list[str] = []  # steps of this cycle
        self._trial: tuple[Any, list[str], int] | None = None  # the first step, until a better recording
        self._written: Path | None = None  # this cycle's trace
        self._taken: tuple[Any, Path | None] | None = None  # the last cycle that was recorded, and its trace
        self._base = 0  # bytes on the device when the cycle began, where torch tells
        self._absolute = False  # whether peaks are of all that was allocated
        self._whole = False  # whether no step was complete, so that all events count as one
        self._marks = Marks(lambda: marked(accelerator, prepared, run.world))
        self._exchange = Exchange(run.world)
        self._held: dict[str, int] = {}
        self._workers: int | None = None
        self.traces: list[Path] = []
        self.breakdown = Breakdown(run.world.rank, str(run.world.device))
        self.ranks: list[Breakdown] = []

    # -- the block

    def start(self) -> None:
        """Begin, as ``with`` does.

        Raises:
            StepError: a profile of this run is open already.
            SettingError: traces cannot be written.
        """
        window = self._window
        if window.timing is not None:
            raise StepError("a profile of this run is open already: close it before the next one")
        self._folder = trace_folder(self._output, self._project)
        self._exchange.begin()
        self._going = True
        try:
            self._marks.open()
            window.timing = Waits(window, lambda: None if self._by_hand else self._advance())
            super().start()
        except BaseException:
            self._leave()
            raise

    def step(self) -> None:
        """Begin the next step. From now on only the script's calls count."""
        self._by_hand = True
        self._advance()

    def stop(self) -> None:
        """End, as ``with`` does. The ranks that took part exchange their results."""
        if not self._going:
            return
        try:
            super().stop()
            if self._trial is not None and not self.breakdown.steps:
                self.profiler, self._complete, self._base = self._trial
                self._take()
            if self._taken is not None:  # a later cycle may have warmed up only
                self.profiler, self._written = self._taken
        finally:
            self._leave()
        self._held = footprint(self._prepared)
        self._workers = max((loader.num_workers for loader in self._prepared.loaders), default=None)
        self.ranks = [self.breakdown] if self._failed else self._exchange.end(self.breakdown)
        logger.info("%s", self.summary())

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        self._failed = exc_type is not None
        super().__exit__(exc_type, exc_val, exc_tb)

    def _leave(self) -> None:
        self._going = False
        self._window.timing = None
        self._marks.close()

    def _advance(self) -> None:
        if self.current_action in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE):
            self._complete.append(f"{STEP}{self.step_num}")
        super().step()
        if self.step_num > self._over_after:  # all is recorded: the rest of the block shall cost nothing
            self._window.timing = None
            self._marks.close()
        else:
            self._marks.open()

    # -- a cycle, called by torch.profiler.profile --------------------------------------------------------------------

    def prepare_trace(self) -> None:
        self._written = None
        self._complete = []
        if self._free:
            self.profiler = None  # torch would warn that the trial, which is kept here, is lost
        with env.override(KINETO_LOG_LEVEL=env.read("KINETO_LOG_LEVEL", QUIET)):
            super().prepare_trace()

    def start_trace(self) -> None:
        if self.use_device == "cuda" and torch.cuda.is_initialized():  # a run on the CPU shall not wake a GPU
            torch.cuda.synchronize()  # kernels launched before belong to no step
            self._base = torch.cuda.memory_allocated()
        super().start_trace()

    def _trace_ready(self) -> None:
        if self._free and (self.step_num <= WARMUP or (self._trial is not None and not self._complete)):
            self._trial = self._trial or (self.profiler, self._complete, self._base)
            return
        self._take()
        super()._trace_ready()

    def _take(self) -> None:
        """Write the trace of this cycle, and add it to the breakdown."""
        rank = self._world.rank
        try:
            self._written = write_trace(self._folder, rank, super().export_chrome_trace)
            self.traces.append(self._written)
        except (OSError, RuntimeError) as error:
            logger.warning("rank %d: no trace in %s: %s", rank, self._folder, error, main_process_only=False)
        self._taken, self._trial = (self.profiler, self._written), None
        assert self.profiler is not None
        recorded: Any = self.profiler.kineto_results
        recording = breakdown.read(recorded.events(), frozenset(self._complete))
        if recording.kernels:
            self.breakdown.device = f"{self.use_device}:{recording.device}"
            self._absolute = self.use_device == "cuda"
        if self._complete or not self.breakdown.steps:
            self._whole = not self._complete
            self.breakdown.add(recording, self._base if recording.kernels else 0)

    def export_chrome_trace(self, path: str, *args: Any, **kwargs: Any) -> None:
        """Export as torch does. A trace that is written already is copied, because torch writes each only once."""
        if self._written is None or args or kwargs:
            super().export_chrome_trace(path, *args, **kwargs)
            return
        opened = gzip.open if path.endswith(".gz") else open
        with open(self._written, "rb") as old, opened(path, "wb") as new:
            shutil.copyfileobj(old, new)

    # -- in words -----------------------------------------------------------------------------------------------------

    def summary(self) -> str:
        """A table of the time (and memory, where it was recorded) of the recorded steps by phase, and sentences on what stands out.

        On the first of the ranks that took part, with the others' figures; ``accelerator.print(prof.summary())`` shows it there.
        """
        own, world = self.breakdown, self._world
        if not own.steps:
            return "profile: nothing was recorded; the block was over before its schedule's active steps"
        whole = ": all that was recorded, for no step in it was complete" if self._whole else ""
        who = f"rank {own.rank} of {world.size}" if world.size > 1 else own.device
        lines = [f"profile of {who}, {breakdown.durations(own.steps)}{whole}", breakdown.table(own)]
        if own.peak:
            since = "beyond what there was when recording began"
            place = f"allocated on {own.device}" if self._absolute else since
            held = ", ".join(f"{name} {size(number)}" for name, number in self._held.items())
            lines += [f"memory: {place}", *([f"there at the end: {held}"] if held else [])]
        if len(self.ranks) > 1:
            lines += ["", breakdown.of_ranks(self.ranks)]
        said = breakdown.sentences(own, self.ranks, self._workers)
        if self._exchange.late:
            said.append(f"No result came in time from rank {', '.join(map(str, self._exchange.late))}.")
        lines += ["", *(textwrap.fill(sentence, 80) for sentence in said)]
        return "\n".join([*lines, *(f"trace: {trace}" for trace in self.traces[-1:])])


# -- what to record ----------------------------------------------------------------------------------------------------


def _three_steps(step: int) -> ProfilerAction:
    if step == WARMUP:
        return ProfilerAction.WARMUP
    if step in (TRIAL, LAST):
        return ProfilerAction.RECORD_AND_SAVE
    return ProfilerAction.RECORD if FIRST <= step < LAST else ProfilerAction.NONE


def _last_step(given: Mapping[str, int] | None) -> float:
    """The last step that is recorded."""
    if given is None or not given.get("repeat", 0):
        return math.inf
    cycle = given.get("wait", 0) + given.get("warmup", 0) + given["active"]
    return given.get("skip_first", 0) + given["repeat"] * cycle - 1


def _activities(how: ProfileKwargs) -> list[ProfilerActivity] | None:
    """torch's activities. Those that this machine lacks are omitted, with a line in the log; RefusedError if none is left."""
    if how.activities is None:
        return None
    here = {activity.name.lower(): activity for activity in torch.profiler.supported_activities()}
    words = list(dict.fromkeys(activity_word(given) for given in how.activities))
    missing = [word for word in words if word not in here]
    if missing == words:
        raise RefusedError(
            f"none of the activities {', '.join(words)} can be recorded here: there are {', '.join(sorted(here))}"
        )
    if missing:
        logger.info("not recorded, for this machine has none: %s", ", ".join(missing))
    return [here[word] for word in words if word in here]


# -- traces ------------------------------------------------------------------------------------------------------------


def trace_folder(given: str | os.PathLike[str] | None, project: str | None) -> Path:
    """Make the folder for traces."""
    if given is None and project is not None and "://" in project:
        raise SettingError(f"traces are local files, and project_dir={project!r} is a URL: {NAME_ONE}")
    folder = Path(given) if given is not None else Path(project or os.curdir, "profile")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        why = error.strerror or error
        raise SettingError(f"traces cannot be written to {folder}: {why}; {NAME_ONE}") from error
    return folder


def write_trace(folder: Path, rank: int, export: Callable[[str], object]) -> Path:
    """Write the rank's next trace, ``rank0-001.json``, ``rank0-002.json`` …, atomically."""
    number = 1
    while (path := folder / f"rank{rank}-{number:03d}.json").exists():
        number += 1
    new = folder / f".new-{os.getpid()}-{path.name}"
    try:
        export(str(new))
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    return path


# -- marks -------------------------------------------------------------------------------------------------------------


def marked(accelerator: Any, prepared: Any, world: Any) -> Iterator[Target]:
    """The methods that a step of `accelerator` calls, on the objects `prepared` so far."""
    for model in prepared.models:
        yield model.module, CALL, FORWARD
        if prepared.strategy.late_loss:  # stages run their forwards inside backward
            yield model.module.module, CALL, FORWARD
    yield accelerator, "backward", BACKWARD
    for name in ("clip_grad_norm_", "clip_grad_value_", "unscale_gradients"):
        yield accelerator, name, OPTIMIZER
    for optimizer in prepared.optimizers:
        yield optimizer, "step", OPTIMIZER
        yield optimizer, "zero_grad", OPTIMIZER
    for scheduler in prepared.schedulers:
        yield scheduler, "step", OPTIMIZER
    yield world, "barrier", COMMUNICATION


class Marks:
    """Marks the phases of a step between `open` and `close`; a further `open` takes in targets that were added since.

    Instances get functions in place of the methods that a step calls, which mark the phase (``easymp: backward``) and call the method;
    a run without a profile has none of them. A model is marked around all hooks, where torch.compile puts its compiled call.
    """

    def __init__(self, targets: Callable[[], Iterator[Target]]) -> None:
        self._targets = targets
        self._shadows: dict[tuple[int, str], Shadow] = {}

    def open(self) -> None:
        for thing, name, phase in self._targets():
            if (id(thing), name) not in self._shadows:
                self._shadows[id(thing), name] = Shadow(thing, name, phase)

    def close(self) -> None:
        while self._shadows:
            self._shadows.popitem()[1].lift()


class Shadow:
    """One method of one instance, marked until `lift`."""

    def __init__(self, thing: Any, name: str, phase: str) -> None:
        self._attributes, self._name = thing.__dict__, name
        self._before = self._attributes.get(name)
        method = (self._before or thing._call_impl) if isinstance(thing, nn.Module) else getattr(thing, name)
        self._lifted = False

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._lifted:  # the script has wrapped this function in the meantime and keeps it
                return method(*args, **kwargs)
            there = NO_GRAD if phase == FORWARD and not torch.is_grad_enabled() else phase
            with record_function(PREFIX + there):
                return method(*args, **kwargs)

        self._call = self._attributes[name] = call

    def lift(self) -> None:
        self._lifted = True
        if self._attributes.get(self._name) is not self._call:
            return
        if self._before is None:
            del self._attributes[self._name]
        else:
            self._attributes[self._name] = self._before


class Waits:
    """Marks the time inside a loader's ``next``, as the window reports it, and calls `begin_step` at the beginning of a step.

    A step begins when the outermost loader is asked for the batch after one that it gave, unless that batch's accumulation window is
    still open.
    """

    def __init__(self, window: Any, begin_step: Callable[[], None]) -> None:
        self._window, self._begin_step = window, begin_step
        self._open: list[tuple[Any, record_function]] = []
        self._given = False

    def asks(self, loader: Any) -> None:
        if self._given and self._window.outermost is loader and self._window.sync:
            self._given = False
            self._begin_step()
            if self._window.timing is not self:
                return  # that was the last step to be recorded
        mark = record_function(PREFIX + DATA)
        mark.__enter__()
        self._open.append((loader, mark))

    def has(self, loader: Any) -> None:
        self._given |= self._window.outermost is loader
        self.over(loader)

    def over(self, loader: Any) -> None:
        while any(asking is loader for asking, _ in self._open):
            self._open.pop()[1].__exit__(None, None, None)


# -- other ranks, and memory -------------------------------------------------------------------------------------------


class Exchange:
    """Results of ranks that profile the same steps, through the store: no collective, since any rank may profile alone.

    The first rank that started waits a limited time for the others. The n-th profile of one rank belongs to the n-th of the others.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._store: Any = None
        self.late: list[int] = []  # ranks that began and did not end in time

    def begin(self) -> None:
        if self._world.size > 1:
            self._store = self._world.store()
            self._key = f"profile/{self._store.add(f'profiles/{self._world.rank}', 1)}"
            self._store.set(f"{self._key}/begun/{self._world.rank}", "")

    def end(self, own: Breakdown) -> list[Breakdown]:
        """The results of all ranks in order on the first of them; on the others, their own."""
        store, self._store = self._store, None
        if store is None:
            return [own]
        done, deadline = f"{self._key}/done", time.monotonic() + min(PATIENCE, self._world.timeout)
        with suppress(RuntimeError):  # the world was left inside the block, or rank 0 and its store are gone
            store.set(f"{done}/{own.rank}", json.dumps(asdict(own)))
            begun = [r for r in range(self._world.size) if store.check([f"{self._key}/begun/{r}"])]
            if begun[0] == own.rank:
                while late := [r for r in begun if not store.check([f"{done}/{r}"])]:
                    if time.monotonic() >= deadline:
                        break
                    time.sleep(0.02)
                self.late = late
                return [Breakdown(**json.loads(store.get(f"{done}/{r}"))) for r in begun if r not in late]
        return [own]


@torch.no_grad()
def footprint(prepared: Any) -> dict[str, int]:
    """Bytes on this rank of weights (with buffers), fp32 masters, gradients and optimizer states; those of 0 are left out."""
    models = [route.original for route in prepared.models]
    weights = [t for model in models for t in (*model.parameters(), *model.buffers())]
    known = {id(t) for t in weights}
    stepped = [p for o in prepared.optimizers for group in o.param_groups for p in group["params"]]
    states = [state for o in prepared.optimizers for state in o.state.values() if isinstance(state, dict)]
    tensors = {
        "weights": weights,
        "masters": [p for p in stepped if id(p) not in known],  # stepped in place of a model's parameters
        "gradients": [p.grad for model in models for p in model.parameters() if p.grad is not None],
        "optimizer": [value for state in states for value in state.values() if isinstance(value, Tensor)],
    }
    found = {}
    for name, held in tensors.items():
        here = [part for tensor in held if not (part := local(tensor)).is_meta]
        storages = [part.untyped_storage() for part in here if part.layout is torch.strided]
        each_once = {storage.data_ptr(): storage.nbytes() for storage in storages}
        found[name] = sum(each_once.values())
    return {name: total for name, total in found.items() if total}
