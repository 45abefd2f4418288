"""wall_clock_breakdown, and the flops profiler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ...errors import SettingError


def now(device: torch.device) -> float:
    """Seconds, after all that the device was told to do."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


class Watches:
    """Time in the phases of a step; where it is off, nothing waits for the device."""

    def __init__(self, on: bool, device: torch.device) -> None:
        self._on, self._device = on, device
        self._seconds: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if not self._on:
            yield
            return
        begin = now(self._device)
        yield
        self._seconds.setdefault(phase, []).append(now(self._device) - begin)

    def tell(self, say: Callable[..., None]) -> None:
        """Means since the last time, in milliseconds."""
        if self._on and self._seconds:
            say(
                "time (ms) | %s",
                " | ".join(f"{name}: {1e3 * sum(s) / len(s):.2f}" for name, s in self._seconds.items()),
            )
            self._seconds.clear()


class Flops:
    """Counts one forward of the model, by torch's FlopCounterMode: matrix products, convolutions, attention.

    Args:
        options: "profile_step" (1): the update whose first forward is counted; "output_file": where the report goes, in place of the
            terminal.
    """

    def __init__(self, options: dict[str, Any], device: torch.device) -> None:
        step = options.get("profile_step", 1)
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise SettingError(f"flops_profiler.profile_step={step!r} is no number of an update")
        self.step: int | None = step
        self._file, self._device = options.get("output_file"), device
        self.report = ""

    @contextmanager
    def counting(self, model: nn.Module, samples: int) -> Iterator[None]:
        """Inside is the forward."""
        self.step = None  # once
        counter = FlopCounterMode(display=False)
        begin = now(self._device)
        with counter:
            yield
        seconds = now(self._device) - begin
        flops, parameters = counter.get_total_flops(), sum(p.numel() for p in model.parameters())
        self.report = (
            f"flops profiler, one forward: {flops:,} floating-point operations, {parameters:,} parameters, {seconds * 1e3:.2f} ms, "
            f"{flops / max(seconds, 1e-9):.3g} operations a second; the counting itself takes time"
        )
        if self._file:
            with open(self._file, "w", encoding="utf-8") as file:
                file.write(self.report + "\n")
        else:
            print(self.report)  # noqa: T201 (as asked for by the configuration)
