"""O1's casts, which hold from `initialize` on for all code of its thread, and the functions that users add to the lists."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from ....options import AutocastKwargs
from ....precision.cast_lists import Cast, ListedCasts, as_listed, cast_table
from ....precision.levels import O1
from ..layer import ApexError


class Casts:
    """On or off, for the thread that turned them on."""

    def __init__(self) -> None:
        self._entered = ExitStack()
        self._running: AbstractContextManager[Any] | None = None
        self._device = torch.device("cpu")
        self._suspended = 0

    def on(self, device: torch.device) -> None:
        """Torch's functions cast from now on: those of Apex's lists, on `device` by torch's autocast where it has them."""
        self.off()
        self._device = device
        # Cast weights would outlive the step that changes them: no block ends, at which torch forgets them.
        self._running = O1().casting(device, AutocastKwargs(cache_enabled=False))
        self._entered.enter_context(self._running)

    def off(self) -> None:
        """No more."""
        self._entered.close()
        self._running = None

    @property
    def active(self) -> bool:
        return self._running is not None and not self._suspended

    @contextmanager
    def suspended(self) -> Any:
        """Inside, nothing is cast."""
        running = self._running
        away: AbstractContextManager[Any] = nullcontext()
        if isinstance(running, ListedCasts):
            away = running.suspended()
        elif running is not None:
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


def _under(cast: Cast, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not casts.active:
            return function(*args, **kwargs)
        args, kwargs = as_listed(cast, function, args, kwargs)
        # A cast that was asked for goes before the list that the function is on.
        with casts.suspended() if function in cast_table() else nullcontext():
            return function(*args, **kwargs)

    return wrapper


def _register(cast: Cast, module: Any, name: str) -> None:
    function = getattr(module, name, None)
    if function is None:
        raise ApexError(
            f"no function named {name!r} in {getattr(module, '__name__', module)}: nothing can be cast for it"
        )
    setattr(module, name, _under(cast, function))


def _decorator(cast: Cast, words: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        return _under(cast, fn)

    decorate.__doc__ = f"A decorator: under O1 `fn` gets its floating-point arguments in {words}."
    return decorate


def _registration(cast: Cast, words: str) -> Callable[[Any, str], None]:
    def register(module: Any, name: str) -> None:
        _register(cast, module, name)

    register.__doc__ = (
        f"Cast arguments of ``module.name`` to {words} under O1, for code that looks it up there."
    )
    return register


_TYPES = {Cast.HALF: "fp16", Cast.FLOAT: "fp32", Cast.WIDEST: "the widest type among them"}
half_function, float_function, promote_function = (_decorator(*pair) for pair in _TYPES.items())
register_half_function, register_float_function, register_promote_function = (
    _registration(*pair) for pair in _TYPES.items()
)
