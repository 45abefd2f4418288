"""O1's casts, which hold from `initialize` on for all code of its thread, and the functions that users add to the lists."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from ....options import AutocastKwargs
from ....precision.cast_lists import Cast, ListedCasts, as_listed, cast_table
from ....precision.levels import O1
from .state import ApexError


class Casts:
    """On or off, for the thread that turned them on."""

    def __init__(self) -> None:
        self._entered = ExitStack()
        self._running: AbstractContextManager[Any] | None = None
        self._device = torch.device("cpu")
        self._suspended = 0

    def on(self, device: torch.device) -> None:
        """Torch's functions cast by Apex's lists from now on; on `device` by torch's autocast where it has these lists."""
        self.off()
        self._device = device
        # Cached casts of weights would outlive the step that changes them: torch drops them at the end of a block, and there is none.
        self._running = O1().casting(device, AutocastKwargs(cache_enabled=False))
        self._entered.enter_context(self._running)

    def off(self) -> None:
        self._entered.close()
        self._running = None

    @property
    def active(self) -> bool:
        return self._running is not None and not self._suspended

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, nothing is cast."""
        away: AbstractContextManager[Any] = nullcontext()
        if isinstance(self._running, ListedCasts):
            away = self._running.suspended()
        elif self._running is not None:
            away = torch.autocast(self._device.type, enabled=False)
        self._suspended += 1
        try:
            with away:
                yield
        finally:
            self._suspended -= 1


casts = Casts()


def disable_casts() -> AbstractContextManager[None]:
    """Inside, O1 casts nothing."""
    return casts.suspended()


def _decorator(cast: Cast, words: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not casts.active:
                return fn(*args, **kwargs)
            args, kwargs = as_listed(cast, fn, args, kwargs)
            # The user's cast goes before the list that the function is on.
            with casts.suspended() if fn in cast_table() else nullcontext():
                return fn(*args, **kwargs)

        return wrapper

    decorate.__doc__ = f"A decorator: under O1 `fn` gets its floating-point arguments in {words}."
    return decorate


def _registration(cast: Cast, words: str) -> Callable[[Any, str], None]:
    def register(module: Any, name: str) -> None:
        function = getattr(module, name, None)
        if function is None:
            raise ApexError(
                f"no function named {name!r} in {getattr(module, '__name__', module)}: nothing can be cast for it"
            )
        setattr(module, name, _decorator(cast, words)(function))

    register.__doc__ = (
        f"Cast arguments of ``module.name`` to {words} under O1, for code that looks it up there."
    )
    return register


_TYPES = {Cast.HALF: "fp16", Cast.FLOAT: "fp32", Cast.WIDEST: "the widest type among them"}
half_function, float_function, promote_function = (_decorator(*pair) for pair in _TYPES.items())
register_half_function, register_float_function, register_promote_function = (
    _registration(*pair) for pair in _TYPES.items()
)
