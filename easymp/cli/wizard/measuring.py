"""How fast each precision is on this machine, measured: "bf16 is 2.1 times as fast as fp32".

Small networks (`workloads`) run forward and backward in each precision in turn, so that what else the machine does meets all alike, and
the median over the rounds counts. They start tiny and grow while time is left for enough rounds, so that a slow processor ends in time
as well; a precision that is far slower than fp32 is settled while they are small. fp32 is what a run with ``mixed_precision="fp32"``
has: torch's own switches stand as they are, which lets convolutions use TF32 where a GPU has it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ...hardware import Hardware, detect
from ...precision import PRECISIONS
from ...protocols import Facts
from .workloads import BLOCKS, Sample, Work, together

MEASURED = ("fp32", "tf32", "bf16", "fp16")
BASE = MEASURED[0]
WIDTHS = (64, 128, 256, 512, 1024, 2048)
GROWTH = 8.0  # of the work from one width to the next
ROUNDS = (5, 41)  # at least, of the width that is settled on, and at most
SLOW = 4.0  # times as long as fp32: settled at once
EQUAL = 0.05  # a smaller difference is none
NOISE = 1.5  # quartiles further apart than so many times: other work on the machine decides

Timer = Callable[[Work], float]  # runs it once and returns the seconds


@dataclass(frozen=True)
class Speed:
    """One precision beside fp32.

    Attributes:
        ratio: how many times as fast as fp32: the geometric mean over the blocks, its median over the rounds.
        spread: the lower and upper quartile of the rounds.
        blocks: the median ratio of each block.
        width: of the networks.
    """

    precision: str
    ratio: float
    spread: tuple[float, float]
    blocks: Mapping[str, float]
    rounds: int
    width: int

    @property
    def certain(self) -> bool:
        """Whether the rounds agree with one another, so that the ratio is the machine's and not the moment's."""
        return self.rounds >= ROUNDS[0] and self.spread[1] <= self.spread[0] * NOISE

    def __str__(self) -> str:
        name, times = self.precision, self.ratio
        if not self.certain:
            said = f"{name} beside {BASE} could not be measured: the machine is too busy, or too slow"
        elif times > 1 + EQUAL:
            said = f"{name} is {times:.2g} times as fast as {BASE} on this machine"
        elif times < 1 / (1 + EQUAL):
            said = f"{name} takes {1 / times:.2g} times as long as {BASE} on this machine"
        else:
            said = f"{name} is as fast as {BASE} on this machine"
        each = ", ".join(f"{block} {ratio:.2f}" for block, ratio in self.blocks.items())
        low, high = self.spread
        rounds = (
            "one round" if self.rounds == 1 else f"{self.rounds} rounds, middle half {low:.2f} to {high:.2f}"
        )
        return f"{said} ({each}; {rounds})"


@dataclass(frozen=True)
class Measurement:
    """What was found.

    Attributes:
        device: torch's name of it.
        speeds: fp32 first, then the others in the order of `MEASURED`.
        left_out: precisions that cannot be had here, and why.
        seconds: that it took.
    """

    device: str
    speeds: tuple[Speed, ...]
    left_out: Mapping[str, str]
    seconds: float

    @property
    def fastest(self) -> str:
        """The first precision than which none is faster for certain."""
        ratios = {
            speed.precision: speed.ratio for speed in self.speeds if speed.certain or speed.precision == BASE
        }
        return next(name for name, ratio in ratios.items() if ratio * (1 + EQUAL) >= max(ratios.values()))

    @property
    def sentences(self) -> list[str]:
        """One for each precision but fp32, and one for what was run."""
        said = [str(speed) for speed in self.speeds[1:]]
        said += [f"{name} was left out: {why}" for name, why in self.left_out.items()]
        width = self.speeds[0].width
        return [
            *said,
            f"measured on {self.device} in {self.seconds:.0f} s: forward and backward of {', '.join(BLOCKS)}, {width} wide",
        ]

    def reason(self, precision: str) -> str:
        """Why to take `precision`, for a plan or a comment in a file."""
        speed = next((speed for speed in self.speeds if speed.precision == precision), None)
        if speed is None:
            return f"{precision} was not measured"
        if precision == BASE:
            others = [str(s).split(" (")[0] for s in self.speeds[1:]]
            return "; ".join(others) or "no other precision can be had here"
        return str(speed).split(" (")[0]


@dataclass
class _Rounds:
    """Ratios to fp32, a round each, of the precisions that go on and of those that are settled."""

    width: int = 0
    ratios: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    def add(self, seconds: Mapping[tuple[str, str], float], names: Sequence[str]) -> None:
        for name in names:
            row = {block: seconds[block, BASE] / seconds[block, name] for block in BLOCKS}
            self.ratios.setdefault(name, []).append(row)

    def speed(self, name: str) -> Speed:
        rows = self.ratios[name]
        means = [together(list(row.values())) for row in rows]
        quartiles = statistics.quantiles(means, n=4, method="inclusive") if len(means) > 1 else [means[0]] * 3
        blocks = {block: statistics.median(row[block] for row in rows) for block in BLOCKS}
        return Speed(name, quartiles[1], (quartiles[0], quartiles[2]), blocks, len(rows), self.width)


def measure(
    hardware: Hardware | None = None,
    seconds: float = 10.0,
    cpu: bool = False,
    timer: Timer | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Measurement:
    """Time each precision that this machine can run.

    Args:
        hardware: None looks.
        seconds: after which no further round begins; the last one, and work of a width that was not yet tried, may end later.
        cpu: the processor, although there is an accelerator.
        timer, clock: for tests.
    """
    hardware = detect() if hardware is None else hardware
    device = torch.device("cpu" if cpu else hardware.kind)
    facts, begun = Facts(hardware, device.type, 1), clock()
    refusals = {name: PRECISIONS[name].refuse(facts) for name in MEASURED}
    left_out = {name: refusal.reason for name, refusal in refusals.items() if refusal}
    going = [name for name in MEASURED if name not in left_out]
    timer = timer or timer_for(device)
    found: dict[str, Speed] = {}

    def left() -> float:
        return seconds - (clock() - begun)

    def one_round(
        samples: Sequence[Sample], names: Sequence[str], start: int = 0
    ) -> dict[tuple[str, str], float]:
        order = [*names[start % len(names) :], *names[: start % len(names)]]  # none is always the first
        return {(sample.block, name): timer(Work(sample, name)) for sample in samples for name in order}

    tried, samples = _Rounds(), list[Sample]()
    for width in WIDTHS:
        before, level, wider = clock(), _Rounds(width), [Sample(block, width, device) for block in BLOCKS]
        try:
            runs = {name: _runs(wider, name, timer) for name in going}  # a warm-up, too
            if width == WIDTHS[0]:
                left_out |= {name: why for name, why in runs.items() if why}
                going = [name for name in going if not runs[name]]
            level.add(one_round(wider, going), going)
        except (torch.OutOfMemoryError, MemoryError):
            if not samples:
                raise
            break
        took = clock() - before
        tried, samples = level, wider
        slow = [name for name in going if level.speed(name).ratio * SLOW < 1]
        if slow:
            for number in range(1, ROUNDS[0]):
                if left() > 0:
                    level.add(one_round(samples, [BASE, *slow], number), slow)
            found |= {name: level.speed(name) for name in slow}
            going = [name for name in going if name not in slow]
        if len(going) == 1 or left() < took * GROWTH * (1 + ROUNDS[0]) / 2:
            break
    for number in range(1, ROUNDS[1]):
        before = clock()
        if len(going) == 1 or left() <= 0:
            break
        tried.add(one_round(samples, going, number), going)
        if left() < clock() - before:
            break
    found |= {name: tried.speed(name) for name in going}
    return Measurement(
        str(device), tuple(found[name] for name in MEASURED if name in found), left_out, clock() - begun
    )


def _runs(samples: Sequence[Sample], name: str, timer: Timer) -> str:
    """Why `name` does not run here, whatever the facts say; empty where it does."""
    try:
        for sample in samples:
            timer(Work(sample, name))
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except RuntimeError as error:
        if name == BASE:
            raise
        return f"it does not run ({(str(error).splitlines() or [''])[0]})"
    return ""


def timer_for(device: torch.device) -> Timer:
    """What times one call on `device`: by its own events where it has them and works behind the caller's back."""
    if device.type == "cuda":

        def by_events(work: Work) -> float:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1000

        return by_events

    def by_clock(work: Work) -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize()
        begin = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - begin

    return by_clock
