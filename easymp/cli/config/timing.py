"""Time the precisions on this machine: "bf16 is 2.1 times as fast as fp32".

A transformer layer runs forward and backward in each precision in turn, so that other work on the machine meets all alike, and
the median over the rounds counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from ...base.rng import switch
from ...hardware import Hardware
from ...precision import PRECISIONS
from ...protocols import Facts

BASE, *OTHERS = ("fp32", "tf32", "bf16", "fp16")
WIDTH = {"cpu": 256}  # of the layer, by device; else 1024
SLOW = 4.0  # times as long as fp32: one round is enough
EQUAL = 1.05  # smaller factors count as equal
NOISE = 1.5  # quartiles further apart than this factor: other work on the machine decides
HEAD = 64  # width of a head of attention


@dataclass(frozen=True)
class Measurement:
    """How many times as fast as fp32 each precision ran, in each round."""

    device: str
    ratios: Mapping[str, list[float]]
    left_out: Mapping[str, str]  # the impossible precisions, with the reason
    seconds: float  # that it took

    @property
    def reason(self) -> str:
        """How fast the precisions are, for a plan or a comment in a file."""
        return "; ".join(map(self._reason, self.ratios)) or "no other precision is possible here"

    @property
    def sentences(self) -> list[str]:
        """One for each precision but fp32, and one about the measurement."""
        said = [
            *map(self._reason, self.ratios),
            *(f"{n} was left out: {w}" for n, w in self.left_out.items()),
        ]
        ran = "forward and backward of a transformer layer"
        return [*said, f"measured on {self.device} in {self.seconds:.0f} s: {ran}"]

    def _reason(self, name: str) -> str:
        ratios = self.ratios[name]
        low, times, high = statistics.quantiles(ratios if ratios[1:] else ratios * 2, n=4, method="inclusive")
        between = f"on this machine (middle half of the rounds: {low:.2f} to {high:.2f})"
        if high > low * NOISE:
            return f"{name} beside {BASE} could not be measured: the machine is too busy, or too slow"
        if 1 / EQUAL <= times <= EQUAL:
            return f"{name} is as fast as {BASE} {between}"
        if times > 1:
            return f"{name} is {times:.2g} times as fast as {BASE} {between}"
        return f"{name} takes {1 / times:.2g} times as long as {BASE} {between}"


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
    width = WIDTH.get(device.type, 1024)
    with torch.random.fork_rng(devices=[]):
        layer = nn.TransformerEncoderLayer(width, width // HEAD, 4 * width, dropout=0.0, batch_first=True)
        layer, inputs = layer.to(device), torch.randn(1, 2 * width, width).to(device)

    def step(name: str) -> float:
        """Seconds of forward and backward in a precision."""
        policy = PRECISIONS[name]
        wait = (lambda: None) if device.type == "cpu" else torch.accelerator.synchronize
        with ExitStack() as stack:
            switch(policy.tf32 and device.type != "cpu", False, stack.callback)
            wait()
            begin = time.perf_counter()
            output = policy().forward(layer, device)(inputs)
            torch.autograd.grad(output.float().sum(), list(layer.parameters()))
            wait()
            return time.perf_counter() - begin

    step(BASE)  # a first call allocates and compiles
    found: dict[str, list[float]] = {}
    for name in OTHERS:
        try:
            found |= {} if name in left_out else {name: [step(name) and step(BASE) / step(name)]}
        except RuntimeError as error:
            left_out[name] = f"it does not run ({(str(error).splitlines() or [''])[0]})"
    going = [name for name, ratios in found.items() if ratios[0] * SLOW > 1]
    while going and time.monotonic() - begun < seconds:
        base = step(BASE)
        for name in going:
            found[name].append(base / step(name))
    return Measurement(str(device), found, left_out, time.monotonic() - begun)
