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
        # What was said of a function counts more than the list that it is on.
        with casts.suspended() if function in cast_table() else nullcontext():
            return function(*args, **kwargs)

    return wrapper


def half_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: under O1 `fn` gets its floating-point arguments in fp16."""
    return _under(Cast.HALF, fn)


def float_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: under O1 `fn` gets its floating-point arguments in fp32."""
    return _under(Cast.FLOAT, fn)


def promote_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: under O1 `fn` gets its floating-point arguments in the widest type among them."""
    return _under(Cast.WIDEST, fn)


def _register(cast: Cast, module: Any, name: str) -> None:
    function = getattr(module, name, None)
    if function is None:
        raise ApexError(
            f"no function named {name!r} in {getattr(module, '__name__', module)}: nothing can be cast for it"
        )
    setattr(module, name, _under(cast, function))


def register_half_function(module: Any, name: str) -> None:
    """Put `half_function` around ``module.name``, in place: for code that looks it up there.

    Raises:
        ApexError: there is none.
    """
    _register(Cast.HALF, module, name)


def register_float_function(module: Any, name: str) -> None:
    """Put `float_function` around ``module.name``, in place; as `register_half_function`."""
    _register(Cast.FLOAT, module, name)


def register_promote_function(module: Any, name: str) -> None:
    """Put `promote_function` around ``module.name``, in place; as `register_half_function`."""
    _register(Cast.WIDEST, module, name)
