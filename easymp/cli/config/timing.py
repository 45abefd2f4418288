"""Time the precisions on this machine: "bf16 is 2.1 times as fast as fp32".

A transformer layer runs forward and backward in each precision in turn, so that other work on the machine meets all alike, and
the median over the rounds counts. The layer grows while time is left for enough rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from ...base.torch_flags import switch
from ...hardware import Hardware
from ...precision import PRECISIONS
from ...protocols import Facts

BASE, *OTHERS = MEASURED = ("fp32", "tf32", "bf16", "fp16")
WIDTHS = (64, 128, 256, 512, 1024)
GROWTH = 8  # of the work from one width to the next
ROUNDS = (5, 41)  # at least, and at most
SLOW = 4.0  # times as long as fp32: one round is enough
EQUAL = 1.05  # smaller factors count as equal
NOISE = 1.5  # quartiles further apart than this factor: other work on the machine decides
HEAD = 64  # width of a head of attention


@dataclass(frozen=True)
class Measurement:
    """How many times as fast as fp32 each precision ran: the lower quartile, the median and the upper quartile of the rounds."""

    device: str
    width: int  # of the layer
    ratios: Mapping[str, tuple[float, float, float]]
    left_out: Mapping[str, str]  # the impossible precisions, with the reason
    seconds: float  # that it took

    @property
    def fastest(self) -> str:
        """The first precision that no other certainly beats."""
        known = {BASE: 1.0} | {name: r[1] for name, r in self.ratios.items() if self._certain(name)}
        return next(name for name, ratio in known.items() if ratio * EQUAL >= max(known.values()))

    def _certain(self, name: str) -> bool:
        low, _, high = self.ratios[name]
        return high <= low * NOISE

    @property
    def sentences(self) -> list[str]:
        """One for each precision but fp32, and one about the layer."""
        said = [f"{self.reason(n)} (middle half {r[0]:.2f} to {r[2]:.2f})" for n, r in self.ratios.items()]
        said += [f"{name} was left out: {why}" for name, why in self.left_out.items()]
        ran = f"forward and backward of a transformer layer, {self.width} wide"
        return [*said, f"measured on {self.device} in {self.seconds:.0f} s: {ran}"]

    def reason(self, name: str) -> str:
        """How fast `name` is, for a plan or a comment in a file."""
        if name not in self.ratios:
            return "; ".join(map(self.reason, self.ratios)) or "no other precision is possible here"
        times = self.ratios[name][1]
        if not self._certain(name):
            return f"{name} beside {BASE} could not be measured: the machine is too busy, or too slow"
        if 1 / EQUAL <= times <= EQUAL:
            return f"{name} is as fast as {BASE} on this machine"
        if times > 1:
            return f"{name} is {times:.2g} times as fast as {BASE} on this machine"
        return f"{name} takes {1 / times:.2g} times as long as {BASE} on this machine"


class Step:
    """Forward and backward of a transformer layer; a call returns the seconds in a precision."""

    def __init__(self, width: int, device: torch.device) -> None:
        with torch.random.fork_rng(devices=[]):
            layer = nn.TransformerEncoderLayer(width, width // HEAD, 4 * width, dropout=0.0, batch_first=True)
            self.device, self.layer = device, layer.to(device)
            self.inputs = torch.randn(1, 2 * width, width).to(device)

    def __call__(self, name: str) -> float:
        policy = PRECISIONS[name]
        wait = (lambda: None) if self.device.type == "cpu" else torch.accelerator.synchronize
        with ExitStack() as stack:
            switch(policy.tf32 and self.device.type != "cpu", False, stack.callback)
            wait()
            begin = time.perf_counter()
            output = policy().forward(self.layer, self.device)(self.inputs)
            torch.autograd.grad(output.float().sum(), list(self.layer.parameters()))
            wait()
            return time.perf_counter() - begin


def measure(hardware: Hardware, seconds: float = 10.0, cpu: bool = False) -> Measurement:
    """Time each precision that this machine can run.

    Args:
        seconds: after which no further round begins.
        cpu: the processor, although there is an accelerator.

    Raises:
        RuntimeError: torch cannot use the device.
    """
    begun, device = time.monotonic(), torch.device("cpu" if cpu else hardware.kind)
    refusals = {name: PRECISIONS[name].refuse(Facts(hardware, device.type, 1)) for name in OTHERS}
    left_out = {name: refusal.reason for name, refusal in refusals.items() if refusal}
    going = [name for name in OTHERS if name not in left_out]
    found: dict[str, list[float]] = {}

    def left() -> float:
        return seconds - (time.monotonic() - begun)

    for width in WIDTHS:
        before, step = left(), Step(width, device)
        step(BASE)  # a first call allocates and compiles
        for name in list(going):
            try:
                step(name)
            except RuntimeError as error:
                left_out[name] = f"it does not run ({(str(error).splitlines() or [''])[0]})"
                going.remove(name)
        base, times = step(BASE), {name: step(name) for name in going}
        found |= {name: [base / taken] for name, taken in times.items()}
        going = [name for name, taken in times.items() if taken < base * SLOW]
        if not going or left() < (before - left()) * GROWTH * ROUNDS[0] / 2:
            break
    for _ in range(ROUNDS[1]):
        if not going or left() <= 0:
            break
        base = step(BASE)
        for name in going:
            found[name].append(base / step(name))
    return Measurement(
        str(device), width, {n: _quartiles(r) for n, r in found.items()}, left_out, seconds - left()
    )


def _quartiles(ratios: list[float]) -> tuple[float, float, float]:
    if len(ratios) == 1:  # far slower, or no time for more
        return ratios[0], ratios[0], ratios[0]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, middle, high
