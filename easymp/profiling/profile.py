"""torch.profiler around a run: what `Accelerator.profile` gives."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity

from ..base import env
from ..base.accumulation import StepClock
from ..base.units import size
from ..distributed import World
from ..errors import RefusedError, StepError
from ..logging import get_logger
from ..options import ProfileKwargs, activity_word
from . import table, traces
from .breakdown import Breakdown
from .exchange import Exchange
from .footprint import footprint
from .marking import Marks, Target, Waits
from .recording import STEP, read

logger = get_logger(__name__)

# Where nobody said what to record: the first step is recorded, for it may be the only one; if the third is complete, it and the two
# after it are the recording, after one that warms up.
TRIAL = 0
WARMUP, FIRST, LAST = 1, 2, 4
QUIET = "99"  # kineto's level of messages; by default it writes two lines a recording


@dataclass(frozen=True)
class Subject:
    """What is profiled.

    Attributes:
        prepared: models, optimizers and loaders.
        targets: the methods to mark.
        project: the project's folder.
    """

    world: World
    clock: StepClock
    prepared: Any
    targets: Callable[[], Iterator[Target]]
    project: str | None


class Profile(torch.profiler.profile):
    """A torch.profiler.profile that knows the phases of a training step, writes its traces, and says in words where the time went.

    Steps are counted by themselves: one begins when the outermost prepared loader is asked for its next batch, under accumulation at the
    beginning of a window. From the first `step` on that the script calls itself, only these count.

    Args:
        how: what to record, and when; None: memory too, and the third to fifth step; the first one if there are not as many; the whole
            block if there are no steps.

    Attributes:
        traces: the files that this rank has written: Chrome's format, for Perfetto and chrome://tracing.
        breakdown: where the time of this rank's recorded steps went; once the block is over.
        ranks: that of all ranks that took part, on the first of them; on the others, their own.
    """

    def __init__(self, subject: Subject, how: ProfileKwargs | None = None) -> None:
        self._subject, self._free = subject, how is None
        how = how or ProfileKwargs(profile_memory=True)
        self._folder = how.output_trace_dir
        super().__init__(
            activities=_activities(how),
            schedule=_three_steps if self._free else _schedule(how.schedule_option),
            on_trace_ready=how.on_trace_ready,
            record_shapes=how.record_shapes,
            profile_memory=how.profile_memory,
            with_stack=how.with_stack,
            with_flops=how.with_flops,
            with_modules=how.with_modules,
        )
        self.record_steps = True  # without a schedule, too
        self._over_after = LAST if self._free else _last_step(how.schedule_option)
        self._by_hand = False
        self._going = self._failed = False
        self._complete: list[str] = []  # steps of this cycle
        self._trial: tuple[Any, list[str], int] | None = (
            None  # the recording of the first step, until there is a better one
        )
        self._written: Path | None = None  # this cycle's trace
        self._taken: tuple[Any, Path | None] | None = None  # the last cycle that was recorded, and its trace
        self._base = 0  # bytes on the device when it began, where torch tells
        self._absolute = False  # whether peaks are of all that was allocated
        self._whole = False  # whether no step was complete, so that all there is counts as one
        self._marks = Marks(subject.targets)
        self._exchange = Exchange(subject.world)
        self._state: dict[str, int] = {}
        self._workers: int | None = None
        self.traces: list[Path] = []
        self.breakdown = Breakdown(subject.world.rank, str(subject.world.device))
        self.ranks: list[Breakdown] = []

    # -- the block ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin; what ``with`` does.

        Raises:
            StepError: a profile of this run is open already.
            SettingError: traces cannot be written.
        """
        if self._subject.clock.timing is not None:
            raise StepError("a profile of this run is open already: close it before the next one")
        self._place = traces.ready_folder(self._folder, self._subject.project)
        self._exchange.begin()
        self._going = True
        try:
            self._marks.open()
            self._subject.clock.timing = Waits(self._subject.clock, self._advance_by_itself)
            super().start()
        except BaseException:
            self._leave()
            raise

    def step(self) -> None:
        """The next step begins. From now on steps are those that the script calls."""
        self._by_hand = True
        self._advance()

    def stop(self) -> None:
        """End; what ``with`` does. The ranks that took part show each other what they found."""
        if not self._going:
            return
        try:
            super().stop()
            if self._trial is not None and not self.breakdown.steps:
                self.profiler, self._complete, self._base = self._trial
                self._take()
            if self._taken is not None:  # where a cycle that has only warmed up is in its place
                self.profiler, self._written = self._taken
        finally:
            self._leave()
        self._state = footprint(self._subject.prepared)
        self._workers = max((loader.num_workers for loader in self._subject.prepared.loaders), default=None)
        self.ranks = [self.breakdown] if self._failed else self._exchange.end(self.breakdown)
        logger.info("%s", self.summary())

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        self._failed = exc_type is not None
        super().__exit__(exc_type, exc_val, exc_tb)

    def _leave(self) -> None:
        self._going = False
        self._subject.clock.timing = None
        self._marks.close()

    def _advance_by_itself(self) -> None:
        if not self._by_hand:
            self._advance()

    def _advance(self) -> None:
        if self.current_action in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE):
            self._complete.append(f"{STEP}{self.step_num}")
        super().step()
        if (
            self.step_num > self._over_after
        ):  # nothing more is recorded: the rest of the block shall cost nothing
            self._subject.clock.timing = None
            self._marks.close()
        else:
            self._marks.open()

    # -- a cycle ------------------------------------------------------------------------------------------------------

    def prepare_trace(self) -> None:
        self._written = None
        self._complete = []
        if self._free:
            self.profiler = (
                None  # another one is made; torch warns that this one is lost, which is kept as the trial
            )
        with env.override(KINETO_LOG_LEVEL=env.read("KINETO_LOG_LEVEL", QUIET)):
            super().prepare_trace()

    def start_trace(self) -> None:
        if (
            self.use_device == "cuda" and torch.cuda.is_initialized()
        ):  # else this process computes on the CPU, and shall go on so
            torch.cuda.synchronize()  # what was launched before belongs to no step
            self._base = torch.cuda.memory_allocated()
        super().start_trace()

    def _trace_ready(self) -> None:
        if self._free and (self.step_num <= WARMUP or (self._trial is not None and not self._complete)):
            self._trial = self._trial or (self.profiler, self._complete, self._base)
            return
        self._take()
        super()._trace_ready()

    def _take(self) -> None:
        """Write the trace of this cycle, and count it into the table."""
        rank = self._subject.world.rank
        try:
            self._written = traces.write(self._place, rank, super().export_chrome_trace)
            self.traces.append(self._written)
        except (OSError, RuntimeError) as error:
            logger.warning("rank %d: no trace in %s: %s", rank, self._place, error, main_process_only=False)
        self._taken, self._trial = (self.profiler, self._written), None
        assert self.profiler is not None
        recorded: Any = self.profiler.kineto_results
        recording = read(recorded.events(), frozenset(self._complete))
        if recording.kernels:
            self.breakdown.device = f"{self.use_device}:{recording.device}"
            self._absolute = self.use_device == "cuda"
        if self._complete or not self.breakdown.steps:
            self._whole = not self._complete
            self.breakdown.add(recording, self._base if recording.kernels else 0)

    def export_chrome_trace(self, path: str, *args: Any, **kwargs: Any) -> None:
        """As torch's; of a cycle whose trace is written already, a copy, for torch writes each once only."""
        if self._written is None or args or kwargs:
            super().export_chrome_trace(path, *args, **kwargs)
        else:
            traces.copy(self._written, path)

    # -- in words -----------------------------------------------------------------------------------------------------

    def summary(self) -> str:
        """A table of where the time (and memory, where it was recorded) of the recorded steps went, and what stands out in words.

        On the first of the ranks that took part, with the others' figures; ``accelerator.print(prof.summary())`` shows it there.
        """
        own = self.breakdown
        if not own.steps:
            return "profile: nothing was recorded; the block was over before its schedule's active steps"
        whole = ": all that was recorded, for no step in it was complete" if self._whole else ""
        who = f"rank {own.rank} of {self._subject.world.size}" if self._subject.world.size > 1 else own.device
        lines = [
            f"profile of {who}, {table.how_long(own.steps)}{whole}",
            table.table(own),
            *self._about_memory(),
        ]
        if len(self.ranks) > 1:
            lines += ["", table.of_ranks(self.ranks)]
        said = table.sentences(own, self.ranks, self._workers)
        if self._exchange.late:
            said.append(f"Of rank {', '.join(map(str, self._exchange.late))} nothing was heard in time.")
        lines += ["", *(textwrap.fill(sentence, 80) for sentence in said)]
        return "\n".join([*lines, *(f"trace: {trace}" for trace in self.traces[-1:])])

    def _about_memory(self) -> list[str]:
        if not self.breakdown.peak:
            return []
        what = (
            f"allocated on {self.breakdown.device}"
            if self._absolute
            else "beyond what there was when recording began"
        )
        held = ", ".join(f"{name} {size(number)}" for name, number in self._state.items())
        return [f"memory: {what}", *([f"there at the end: {held}"] if held else [])]


def _three_steps(step: int) -> ProfilerAction:
    if step == WARMUP:
        return ProfilerAction.WARMUP
    if step in (TRIAL, LAST):
        return ProfilerAction.RECORD_AND_SAVE
    return ProfilerAction.RECORD if FIRST <= step < LAST else ProfilerAction.NONE


def _schedule(given: Mapping[str, int] | None) -> Callable[[int], ProfilerAction] | None:
    return None if given is None else torch.profiler.schedule(**{"wait": 0, "warmup": 0, **given})  # type: ignore[arg-type]


def _last_step(given: Mapping[str, int] | None) -> float:
    """After which nothing is recorded any more."""
    if given is None or not given.get("repeat", 0):
        return math.inf
    cycle = given.get("wait", 0) + given.get("warmup", 0) + given["active"]
    return given.get("skip_first", 0) + given["repeat"] * cycle - 1


def _activities(how: ProfileKwargs) -> list[ProfilerActivity] | None:
    """As torch knows them; those that are not here are left out, with a line in the log.

    Raises:
        RefusedError: none of them is here.
    """
    if how.activities is None:
        return None
    here = {activity.name.lower(): activity for activity in torch.profiler.supported_activities()}
    words = list(dict.fromkeys(activity_word(given) for given in how.activities))
    there = [here[word] for word in words if word in here]
    if not there:
        raise RefusedError(
            f"none of the activities {', '.join(words)} can be recorded here: there are {', '.join(sorted(here))}"
        )
    if len(there) < len(words):
        logger.info(
            "not recorded, for there is none here: %s", ", ".join(word for word in words if word not in here)
        )
    return there
