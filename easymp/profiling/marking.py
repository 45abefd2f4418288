"""Marks of phases in a trace, while a profile is open.

Methods of our own objects that a training step goes through are shadowed: their instances get a function that marks and calls the
method. So a run without a profile has none of them. A model is marked at the place at which torch.compile puts what it compiled,
around all hooks; when the profile is closed everything is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from .phases import BACKWARD, COMMUNICATION, DATA, FORWARD, NO_GRAD, OPTIMIZER, PREFIX

Target = tuple[Any, str, str]  # an object, its method, and the phase in which that runs
CALL = "_compiled_call_impl"  # what a call of a module goes to, where there is one


def marked(accelerator: Any, prepared: Any, world: Any) -> Iterator[Target]:
    """What a step of `accelerator` goes through, with what it has `prepared` so far."""
    for model in prepared.models:
        yield model.route.module, CALL, FORWARD
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
    """Shadows `targets` between `open` and `close`."""

    def __init__(self, targets: Callable[[], Iterator[Target]]) -> None:
        self._targets = targets
        self._shadows: dict[tuple[int, str], Shadow] = {}

    def open(self) -> None:
        """Shadow what is there; called again, also what has come since."""
        for thing, name, phase in self._targets():
            if (id(thing), name) not in self._shadows:
                self._shadows[id(thing), name] = Shadow(thing, name, phase)

    def close(self) -> None:
        while self._shadows:
            self._shadows.popitem()[1].lift()


class Shadow:
    """One method of one instance, marked until `lift`."""

    def __init__(self, thing: Any, name: str, phase: str) -> None:
        self._place, self._name = thing.__dict__, name
        self._before = self._place.get(name)
        method = (self._before or thing._call_impl) if isinstance(thing, nn.Module) else getattr(thing, name)
        self._lifted = False

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._lifted:  # somebody has wrapped it in the meantime
                return method(*args, **kwargs)
            with record_function(
                PREFIX + (phase if phase != FORWARD or torch.is_grad_enabled() else NO_GRAD)
            ):
                return method(*args, **kwargs)

        self._call = self._place[name] = call

    def lift(self) -> None:
        self._lifted = True
        if self._place.get(self._name) is not self._call:
            return
        if self._before is None:
            del self._place[self._name]
        else:
            self._place[self._name] = self._before


class Waits:
    """What the clock tells of loaders: marks of the time inside a loader's next, and where a step begins.

    A step begins when the outermost loader is asked for the batch after one that it gave, unless that one's accumulation window goes on.
    """

    def __init__(self, clock: Any, begin_step: Callable[[], None]) -> None:
        self._clock, self._begin_step = clock, begin_step
        self._open: list[tuple[Any, record_function]] = []
        self._given = False

    def asks(self, loader: Any) -> None:
        if self._given and self._clock.outermost is loader and self._clock.sync:
            self._given = False
            self._begin_step()
            if self._clock.timing is not self:
                return  # that was the last one to be recorded
        mark = record_function(PREFIX + DATA)
        mark.__enter__()
        self._open.append((loader, mark))

    def has(self, loader: Any) -> None:
        self._given |= self._clock.outermost is loader
        self.over(loader)

    def over(self, loader: Any) -> None:
        while any(asking is loader for asking, _ in self._open):
            self._open.pop()[1].__exit__(None, None, None)
