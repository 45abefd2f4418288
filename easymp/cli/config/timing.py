"""How fast each precision is on this machine, measured: "bf16 is 2.1 times as fast as fp32".

Small networks run forward and backward in each precision in turn, so that other work on the machine meets all alike, and the
median over the rounds counts. The networks start tiny and grow while time is left for enough rounds; a precision that is far
slower than fp32 is settled while they are small. fp32 is what a run with ``mixed_precision="fp32"`` has.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...base.torch_flags import switch
from ...hardware import Hardware, detect
from ...precision import PRECISIONS
from ...protocols import Facts

MEASURED = ("fp32", "tf32", "bf16", "fp16")
BASE = MEASURED[0]
WIDTHS = (64, 128, 256, 512, 1024, 2048)
GROWTH = 8.0  # of the work from one width to the next
ROUNDS = (5, 41)  # at least, of the width that is settled on, and at most
SLOW = 4.0  # times as long as fp32: settled at once
EQUAL = 0.05  # a smaller difference is none
NOISE = 1.5  # quartiles further apart than this factor: other work on the machine decides
HEAD = 64  # width of a head of attention, as most models have


# -- what runs


def _transformer(width: int) -> tuple[nn.Module, tuple[int, ...]]:
    heads = max(1, width // HEAD)
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
    return layer, (1, 2 * width, width)


def _convolutions(width: int) -> tuple[nn.Module, tuple[int, ...]]:
    planes = width // 4
    convolutions = [nn.Conv2d(planes, planes, 3, padding=1, bias=False) for _ in range(2)]
    layers = convolutions[0], nn.BatchNorm2d(planes), nn.ReLU(), convolutions[1]
    return nn.Sequential(*layers), (max(1, width // 32), planes, 32, 32)


# A network and the shape of its input, for any width.
BLOCKS: dict[str, Callable[[int], tuple[nn.Module, tuple[int, ...]]]] = {
    "transformer": _transformer,
    "convolutions": _convolutions,
}


@dataclass(frozen=True)
class Network:
    """One network on a device, for all precisions; made at its first use."""

    block: str
    width: int
    device: torch.device

    @cached_property
    def made(self) -> tuple[nn.Module, Tensor]:
        with torch.random.fork_rng(devices=[]):
            module, shape = BLOCKS[self.block](self.width)
            return module.to(self.device), torch.randn(shape).to(self.device)


class Work(NamedTuple):
    """A network in a precision: each call is one forward and backward."""

    network: Network
    precision: str

    def __call__(self) -> None:
        module, x = self.network.made
        policy, device = PRECISIONS[self.precision], self.network.device
        with ExitStack() as stack:
            switch(policy.tf32 and device.type != "cpu", False, stack.callback)  # type: ignore[attr-defined]
            output = policy().forward(module, device)(x)
            torch.autograd.grad(output.float().sum(), list(module.parameters()))


Timer = Callable[[Work], float]  # runs the work once and returns the seconds


def by_clock(work: Work) -> float:
    """Run the work once, and wait for the device."""
    synchronize = (lambda: None) if work.network.device.type == "cpu" else torch.accelerator.synchronize
    synchronize()
    begin = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - begin


# -- what is found


@dataclass(frozen=True)
class Speed:
    """One precision beside fp32."""

    precision: str
    ratio: float  # times as fast as fp32: the geometric mean over the blocks, its median over the rounds
    spread: tuple[float, float]  # the lower and upper quartile of the rounds
    blocks: Mapping[str, float]  # the median ratio of each
    rounds: int
    width: int  # of the networks

    @property
    def certain(self) -> bool:
        """Whether the rounds agree, so that the ratio is the machine's and not the moment's."""
        return self.rounds >= ROUNDS[0] and self.spread[1] <= self.spread[0] * NOISE

    @property
    def short(self) -> str:
        name, times = self.precision, self.ratio
        if not self.certain:
            return f"{name} beside {BASE} could not be measured: the machine is too busy, or too slow"
        if 1 / (1 + EQUAL) <= times <= 1 + EQUAL:
            return f"{name} is as fast as {BASE} on this machine"
        faster = (
            f"is {times:.2g} times as fast as" if times > 1 else f"takes {1 / times:.2g} times as long as"
        )
        return f"{name} {faster} {BASE} on this machine"

    def __str__(self) -> str:
        each = ", ".join(f"{block} {ratio:.2f}" for block, ratio in self.blocks.items())
        low, high = self.spread
        return f"{self.short} ({each}; {self.rounds} round(s), middle half {low:.2f} to {high:.2f})"


@dataclass(frozen=True)
class Measurement:
    """The speeds, fp32 first, and the precisions that are impossible here with the reason."""

    device: str
    speeds: tuple[Speed, ...]
    left_out: Mapping[str, str]
    seconds: float  # that it took

    @property
    def fastest(self) -> str:
        """The first precision than which none is certainly faster."""
        ratios = {speed.precision: speed.ratio for speed in self.speeds if speed.certain}
        ratios = {BASE: 1.0} | ratios
        return next(name for name, ratio in ratios.items() if ratio * (1 + EQUAL) >= max(ratios.values()))

    @property
    def sentences(self) -> list[str]:
        """One for each precision but fp32, and one for what was run."""
        said = [str(speed) for speed in self.speeds[1:]]
        said += [f"{name} was left out: {why}" for name, why in self.left_out.items()]
        blocks, width = ", ".join(BLOCKS), self.speeds[0].width
        ran = f"forward and backward of {blocks}, {width} wide"
        return [*said, f"measured on {self.device} in {self.seconds:.0f} s: {ran}"]

    def reason(self, precision: str) -> str:
        """Why to take `precision`, for a plan or a comment in a file."""
        if precision == BASE:
            return "; ".join(s.short for s in self.speeds[1:]) or "no other precision is possible here"
        found = (speed.short for speed in self.speeds if speed.precision == precision)
        return next(found, f"{precision} was not measured")


@dataclass
class _Rounds:
    """Ratios to fp32 of networks of one width: by precision, for each round, by block."""

    width: int = 0
    ratios: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    def run(
        self, networks: Sequence[Network], names: Sequence[str], timer: Timer, noted: Sequence[str]
    ) -> None:
        """Time one round of `names`, each time another one first, and note the ratios of `noted`."""
        start = len(self.ratios.get(noted[-1], ())) % len(names)
        order = [*names[start:], *names[:start]]
        seconds = {(n.block, name): timer(Work(n, name)) for n in networks for name in order}
        for name in noted:
            row = {block: seconds[block, BASE] / seconds[block, name] for block in BLOCKS}
            self.ratios.setdefault(name, []).append(row)

    def speed(self, name: str) -> Speed:
        rows = self.ratios[name]
        means = [math.exp(statistics.fmean(map(math.log, row.values()))) for row in rows]
        quartiles = statistics.quantiles(means, n=4, method="inclusive") if len(means) > 1 else means * 3
        blocks = {block: statistics.median(row[block] for row in rows) for block in BLOCKS}
        return Speed(name, quartiles[1], (quartiles[0], quartiles[2]), blocks, len(rows), self.width)


def measure(
    hardware: Hardware | None = None,
    seconds: float = 10.0,
    cpu: bool = False,
    timer: Timer = by_clock,
    clock: Callable[[], float] = time.monotonic,
) -> Measurement:
    """Time each precision that this machine can run.

    Args:
        seconds: after which no further round begins; the last one, and a first one of a new width, may end later.
        cpu: the processor, although there is an accelerator.
        timer, clock: for tests.

    Raises:
        RuntimeError: torch cannot use the device.
    """
    hardware = detect() if hardware is None else hardware
    device = torch.device("cpu" if cpu else hardware.kind)
    facts, begun = Facts(hardware, device.type, 1), clock()
    refusals = {name: PRECISIONS[name].refuse(facts) for name in MEASURED}
    left_out = {name: refusal.reason for name, refusal in refusals.items() if refusal}
    going = [name for name in MEASURED if name not in left_out]
    found: dict[str, Speed] = {}

    def left() -> float:
        return seconds - (clock() - begun)

    tried, networks = _Rounds(), list[Network]()
    for width in WIDTHS:
        before, level = clock(), _Rounds(width)
        wider = [Network(block, width, device) for block in BLOCKS]
        try:
            why = {name: _why_not(wider, name, timer) for name in going}  # a warm-up, too
            if not networks:
                left_out |= {name: words for name, words in why.items() if words}
                going = [name for name in going if not why[name]]
            level.run(wider, going, timer, going)
        except (torch.OutOfMemoryError, MemoryError):
            if not networks:
                raise
            break
        took, tried, networks = clock() - before, level, wider
        slow = [name for name in going if level.speed(name).ratio * SLOW < 1]
        for _ in range(1, ROUNDS[0] if slow else 1):
            if left() > 0:
                level.run(networks, [BASE, *slow], timer, slow)
        found |= {name: level.speed(name) for name in slow}
        going = [name for name in going if name not in slow]
        if len(going) == 1 or left() < took * GROWTH * (1 + ROUNDS[0]) / 2:
            break
    for _ in range(1, ROUNDS[1]):
        before = clock()
        if len(going) == 1 or left() <= 0:
            break
        tried.run(networks, going, timer, going)
        if left() < clock() - before:
            break
    found |= {name: tried.speed(name) for name in going}
    speeds = tuple(found[name] for name in MEASURED if name in found)
    return Measurement(str(device), speeds, left_out, clock() - begun)


def _why_not(networks: Sequence[Network], name: str, timer: Timer) -> str:
    """Why `name` does not run here, whatever the facts say; "" where it does."""
    try:
        for network in networks:
            timer(Work(network, name))
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except RuntimeError as error:
        if name == BASE:
            raise
        return f"it does not run ({(str(error).splitlines() or [''])[0]})"
    return ""
