"""`Accelerator.profile`: torch.profiler around a run, with the phases of its steps."""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.profiler import ProfilerAction, ProfilerActivity, record_function

from ..base import env
from ..base.parts import Part
from ..distributed.mailbox import Mailbox
from ..errors import RefusedError, SettingError, StepError
from ..logging import get_logger
from ..options import ProfileKwargs, activity_word
from . import breakdown
from .breakdown import BACKWARD, COMMUNICATION, DATA, FORWARD, NO_GRAD, OPTIMIZER, PREFIX, STEP, Breakdown

logger = get_logger(__name__)

# Without ProfileKwargs these first steps are recorded. The first two are slower, and count only where none follows.
WARMUP, STEPS = 2, 5
QUIET = "99"  # kineto's level of messages; by default it writes two lines a recording
AS_TORCH = ("on_trace_ready", "record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")
NAME_FOLDER = "name a folder with ProfileKwargs(output_trace_dir=...)"
PATIENCE = 10.0  # seconds that the first rank waits for the results of the others

Target = tuple[Any, str, str]  # an object, its method, and the phase of that method
CALL = "_compiled_call_impl"  # the attribute of a module that its call runs, where it is set


class Profile(torch.profiler.profile):
    """A torch.profiler.profile with the phases of a training step, which writes its traces and a summary.

    A step begins when the outermost prepared loader is asked for its next batch, under accumulation at the beginning of
    a window. From the first `step` that the script calls itself, only its calls count.

    Args:
        run: the training, with its prepared models, optimizers and loaders.
        options: what to record, and when; None: memory too, and five steps, of which the third to fifth count; of
            fewer than three the last; the whole block if there are no steps.

    Attributes:
        traces: the files that this rank has written: Chrome's format, for Perfetto and chrome://tracing.
        breakdown: the time of this rank's recorded steps by phase; once the block is over.
        ranks: the breakdowns of all ranks that took part, on the first of them; on the others, their result.
    """

    def __init__(self, run: Any, options: ProfileKwargs | None = None) -> None:
        self._run, self._world, self._prepared = run, run.world, run.prepared
        self._automatic = options is None
        options = options or ProfileKwargs(profile_memory=True, schedule_option={"active": STEPS, "repeat": 1})
        self._output, self._project = options.output_trace_dir, run.project.project_dir
        schedule: Any = None
        self._last_step = math.inf  # that is recorded
        if options.schedule_option is not None:
            cycle = {"wait": 0, "warmup": 0, "repeat": 0, "skip_first": 0, **options.schedule_option}
            with warnings.catch_warnings(action="ignore"):  # that steps without a warm-up are slower
                schedule = torch.profiler.schedule(**cycle)
            if cycle["repeat"]:
                steps = cycle["repeat"] * (cycle["wait"] + cycle["warmup"] + cycle["active"])
                self._last_step = cycle["skip_first"] + steps - 1
        as_torch = {name: getattr(options, name) for name in AS_TORCH}
        super().__init__(activities=_activities(options), schedule=schedule, **as_torch)
        self.record_steps = True  # without a schedule, too
        self._by_hand = self._running = self._failed = False
        self._complete_steps: list[str] = []  # of this cycle
        self._base = 0  # bytes on the device when this cycle began, where torch tells
        self._trace: Path | None = None  # of this cycle
        self._last_cycle: tuple[Any, Path | None] | None = None  # the last recorded profiler, and its trace
        self._peaks_are_absolute = False  # whether they count all that was allocated
        self._incomplete = False  # whether no step was complete, so that all events count as one
        self._marks = Marks(lambda: marked_methods(run.accelerator(), run.prepared, run.world))
        self._loader_waits = LoaderWaits(lambda: None if self._by_hand else self._next_step())
        self._mailbox: Mailbox | None = None  # the n-th profile of one rank belongs to the n-th of the others
        self._late_ranks: list[int] = []  # ranks that began and did not end in time
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
        if self._run.parts.get(LoaderWaits.name) is not None:
            raise StepError("a profile of this run is open already: close it before the next one")
        self._folder = trace_folder(self._output, self._project)
        if self._world.size > 1:
            self._mailbox = Mailbox.open(self._world.store(), "profile", self._world.rank, self._world.size)
            self._mailbox.post(f"begun/{self._world.rank}")
        self._running = True
        try:
            self._marks.open()
            self._run.parts.add(self._loader_waits, self._run)
            super().start()
        except BaseException:
            self._running = False
            self._remove_marks()
            raise

    def step(self) -> None:
        """Begin the next step. From now on only the script's calls count."""
        self._by_hand = True
        self._next_step()

    def stop(self) -> None:
        """End, as ``with`` does. The ranks that took part exchange their results."""
        if not self._running:
            return
        try:
            super().stop()
            if self._last_cycle is not None:  # a later cycle may have warmed up only
                self.profiler, self._trace = self._last_cycle
        finally:
            self._running = False
            self._remove_marks()
        self._workers = max((loader.num_workers for loader in self._prepared.loaders), default=None)
        self.ranks = [self.breakdown]
        if self._mailbox is not None and not self._failed:
            with suppress(RuntimeError):  # the world was left inside the block, or rank 0 and its store are gone
                patience = min(PATIENCE, self._world.timeout)
                self.ranks, self._late_ranks = exchange(self._mailbox, self.breakdown, patience)
        logger.info("%s", self.summary())

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        self._failed = exc_type is not None
        super().__exit__(exc_type, exc_val, exc_tb)  # type: ignore[no-untyped-call]  # torch's method has no types

    def _remove_marks(self) -> None:
        self._run.parts.remove(self._loader_waits)
        self._loader_waits._run = None
        self._marks.close()

    def _next_step(self) -> None:
        if self.current_action in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE):
            self._complete_steps.append(f"{STEP}{self.step_num}")
        super().step()
        if self.step_num > self._last_step:  # all is recorded: the rest of the block shall cost nothing
            self._remove_marks()
        else:
            self._marks.open()

    # -- a cycle, called by torch.profiler.profile --------------------------------------------------------------------

    def prepare_trace(self) -> None:
        self._trace, self._complete_steps = None, []
        with env.override(KINETO_LOG_LEVEL=env.read("KINETO_LOG_LEVEL", QUIET)):
            super().prepare_trace()

    def start_trace(self) -> None:
        if self.use_device == "cuda" and torch.cuda.is_initialized():  # a run on the CPU shall not wake a GPU
            torch.cuda.synchronize()  # kernels launched before belong to no step
            self._base = torch.cuda.memory_allocated()
        super().start_trace()

    def _trace_ready(self) -> None:
        """Write the trace of this cycle, and add it to the breakdown."""
        rank = self._world.rank
        try:
            self._trace = write_trace(self._folder, rank, super().export_chrome_trace)
            self.traces.append(self._trace)
        except (OSError, RuntimeError) as error:
            logger.warning("rank %d: no trace in %s: %s", rank, self._folder, error, main_process_only=False)
        self._last_cycle = self.profiler, self._trace
        results: Any = self.profiler.kineto_results if self.profiler is not None else None
        complete = self._complete_steps
        first = min(WARMUP, len(complete) - 1) if self._automatic and complete else 0
        recording = breakdown.read(results.events(), frozenset(complete[first:]))
        if recording.kernels:
            self.breakdown.device = f"{self.use_device}:{recording.device}"
            self._peaks_are_absolute = self.use_device == "cuda"
        if self._complete_steps or not self.breakdown.steps:
            self._incomplete = not self._complete_steps
            self.breakdown.add(recording, self._base if recording.kernels else 0)
        super()._trace_ready()

    def export_chrome_trace(self, path: str, *args: Any, **kwargs: Any) -> None:
        """Export as torch does. A trace that is written already is copied, because torch writes each only once."""
        if self._trace is None or args or kwargs:
            super().export_chrome_trace(path, *args, **kwargs)
            return
        open_file: Any = gzip.open if path.endswith(".gz") else open
        with open(self._trace, "rb") as source, open_file(path, "wb") as target:
            shutil.copyfileobj(source, target)

    # -- text ---------------------------------------------------------------------------------------------------------

    def summary(self) -> str:
        """A table of the time (and memory, where recorded) of the recorded steps by phase, and sentences on it.

        The first of the ranks that took part names the slowest of them.
        """
        result, world = self.breakdown, self._world
        if not result.steps:
            return "profile: nothing was recorded; the block was over before its schedule's active steps"
        subject = f"rank {result.rank} of {world.size}" if world.size > 1 else result.device
        note = ": all that was recorded, for no step in it was complete" if self._incomplete else ""
        shortest, longest = breakdown.ms(min(result.steps)), breakdown.ms(max(result.steps))
        count = len(result.steps)
        steps = f"1 step of {longest}" if count == 1 else f"{count} steps of {shortest} to {longest}"
        lines = [f"profile of {subject}, {steps}{note}", breakdown.table(result)]
        if result.peak:
            relative = "beyond what there was when recording began"
            lines.append(f"memory: {f'allocated on {result.device}' if self._peaks_are_absolute else relative}")
        sentences = breakdown.sentences(result, self.ranks, self._workers)
        if self._late_ranks:
            sentences.append(f"No result came in time from rank {', '.join(map(str, self._late_ranks))}.")
        lines += ["", *(textwrap.fill(sentence, 80) for sentence in sentences)]
        return "\n".join([*lines, *(f"trace: {trace}" for trace in self.traces[-1:])])


# -- what to record ----------------------------------------------------------------------------------------------------


def _activities(options: ProfileKwargs) -> list[ProfilerActivity] | None:
    """torch's activities without those that this machine lacks. Raises RefusedError if none is left."""
    if options.activities is None:
        return None
    supported = {activity.name.lower(): activity for activity in torch.profiler.supported_activities()}
    names = list(dict.fromkeys(activity_word(activity) for activity in options.activities))
    missing = [name for name in names if name not in supported]
    if missing == names:
        raise RefusedError(
            f"none of the activities {', '.join(names)} can be recorded here: there are {', '.join(sorted(supported))}"
        )
    if missing:
        logger.info("not recorded, for this machine has none: %s", ", ".join(missing))
    return [supported[name] for name in names if name in supported]


def trace_folder(output: str | os.PathLike[str] | None, project: str | None) -> Path:
    """Make the folder for traces."""
    if output is None and project is not None and "://" in project:
        raise SettingError(f"traces are local files, and project_dir={project!r} is a URL: {NAME_FOLDER}")
    folder = Path(output) if output is not None else Path(project or os.curdir, "profile")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = error.strerror or error
        raise SettingError(f"traces cannot be written to {folder}: {reason}; {NAME_FOLDER}") from error
    return folder


def write_trace(folder: Path, rank: int, export: Callable[[str], object]) -> Path:
    """Write the rank's next trace, ``rank0-001.json``, ``rank0-002.json`` …, atomically."""
    number = 1
    while (path := folder / f"rank{rank}-{number:03d}.json").exists():
        number += 1
    unfinished = folder / f".new-{os.getpid()}-{path.name}"
    try:
        export(str(unfinished))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


# -- marks -------------------------------------------------------------------------------------------------------------


def marked_methods(accelerator: Any, prepared: Any, world: Any) -> Iterator[Target]:
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

    Instances get functions in place of the methods that a step calls, which mark the phase (``easymp: backward``) and
    call the method. A model is marked around all hooks, where torch.compile puts its compiled call.
    """

    def __init__(self, targets: Callable[[], Iterator[Target]]) -> None:
        self._targets, self._is_open = targets, False
        self._marked: dict[tuple[int, str], tuple[dict[str, Any], Any, Any]] = {}

    def open(self) -> None:
        self._is_open = True
        for owner, name, phase in self._targets():
            if (id(owner), name) not in self._marked:
                attributes = owner.__dict__
                former = attributes.get(name)
                method = (former or owner._call_impl) if isinstance(owner, nn.Module) else getattr(owner, name)
                attributes[name] = mark = self._mark(method, phase)
                self._marked[id(owner), name] = attributes, former, mark

    def _mark(self, method: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._is_open:  # the script has wrapped this function in the meantime and keeps it
                return method(*args, **kwargs)
            actual_phase = NO_GRAD if phase == FORWARD and not torch.is_grad_enabled() else phase
            with record_function(PREFIX + actual_phase):
                return method(*args, **kwargs)

        return call

    def close(self) -> None:
        self._is_open = False
        for (_, name), (attributes, former, mark) in self._marked.items():
            if attributes.get(name) is mark:
                del attributes[name]
                if former is not None:
                    attributes[name] = former
        self._marked.clear()


class LoaderWaits(Part):
    """Marks the time inside a loader's ``next``, and calls `begin_step` at the beginning of a step.

    A step begins when the outermost loader is asked for the batch after one that it gave, unless that batch's
    accumulation window is still open.
    """

    name = "profile"

    def __init__(self, begin_step: Callable[[], None]) -> None:
        self._begin_step = begin_step
        self._open: list[tuple[Any, record_function]] = []
        self._gave_batch = False

    def pass_begins(self, loader: Any) -> None:
        mark = record_function(PREFIX + DATA)
        mark.__enter__()
        self._open.append((loader, mark))

    def batch(self, loader: Any) -> None:
        window = self.run.window
        if self._gave_batch and window.outermost is loader and window.sync:
            self._gave_batch = False
            self._begin_step()
            if self.run is None:
                return  # that was the last step to be recorded
        self.pass_begins(loader)

    def batch_ready(self, loader: Any, batch: Any) -> None:
        self._gave_batch |= self.run.window.outermost is loader
        self.pass_ends(loader)

    def pass_ends(self, loader: Any) -> None:
        while any(waiting is loader for waiting, _ in self._open):
            self._open.pop()[1].__exit__(None, None, None)


# -- other ranks, and memory -------------------------------------------------------------------------------------------


def exchange(mailbox: Mailbox, result: Breakdown, patience: float) -> tuple[list[Breakdown], list[int]]:
    """The results of ranks that profile the same steps, and the ranks that began and did not end in time.

    The first of these ranks waits for the others; these return their own. No collective: any rank may profile alone.
    """
    mailbox.post(f"done/{result.rank}", json.dumps(asdict(result)).encode())
    started = [rank for rank, key in enumerate(mailbox.of_ranks("begun")) if mailbox.has(key)]
    if started[0] != result.rank:
        return [result], []
    late_ranks: list[int] = []
    try:
        mailbox.wait([f"done/{rank}" for rank in started], patience)
    except TimeoutError as error:
        late_ranks = [started[i] for i in error.args[0]]
    in_time = [rank for rank in started if rank not in late_ranks]
    return [Breakdown(**json.loads(mailbox.read(f"done/{rank}"))) for rank in in_time], late_ranks
