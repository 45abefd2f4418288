"""O1's casts, which hold from `initialize` or `init` on for all code of its thread, and the functions that users add to the lists."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import functional

from ...errors import RefusedError, SettingError
from ...options import AutocastKwargs
from ...precision.levels import O1, Cast, ListedCasts, as_listed, cast_table

__all__ = [
    *("disable_casts", "float_function", "half_function", "init", "promote_function"),
    *("register_float_function", "register_half_function", "register_promote_function"),
]


class AmpHandle:
    """O1's casts, on or off, for the thread that turned them on."""

    def __init__(self) -> None:
        self._entered = ExitStack()
        self._running: AbstractContextManager[Any] | None = None
        self._device, self._half = torch.device("cpu"), torch.float16
        self._suspended = 0

    def on(self, device: torch.device, half: torch.dtype = torch.float16, allow_banned: bool = False) -> None:
        """Torch's functions cast from now on, as `init` says; on a GPU by torch's autocast, where its lists are Apex's."""
        self._deactivate()
        self._device, self._half = device, half
        if allow_banned or half != torch.float16:
            banned = {functional.binary_cross_entropy: Cast.FLOAT} if allow_banned else {}
            self._running = ListedCasts({**cast_table(), **banned}, half)
        else:
            # Cached casts of weights would outlive the step that changes them: torch drops them at the end of a block, and there is none.
            self._running = O1().casting(device, AutocastKwargs(cache_enabled=False))
        self._entered.enter_context(self._running)

    def _deactivate(self) -> None:
        self._entered.close()
        self._running = None

    def is_active(self) -> bool:
        return self._running is not None and not self._suspended

    @contextmanager
    def _disable_casts(self) -> Iterator[None]:
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

    def scale_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Refused, as by Apex."""
        raise RefusedError("The old Amp API is no longer supported: use amp.initialize and amp.scale_loss")

    wrap_optimizer = scale_loss


handle = AmpHandle()


def init(
    enabled: bool = True, loss_scale: float | str = "dynamic", enable_caching: bool = True, verbose: bool = False,
    allow_banned: bool = False, *, patch_type: torch.dtype = torch.float16,
) -> AmpHandle:  # fmt: skip
    """O1's casts without models and optimizers; neither cached nor printed. Losses are scaled after `initialize` only.

    With `allow_banned` binary_cross_entropy runs in fp32; otherwise it refuses half precision. Products run in `patch_type`, fp16 or bf16.
    Returns the handle, whose ``_deactivate()`` turns the casts off.
    """
    handle._deactivate()
    if enabled:
        handle.on(torch.device("cuda" if torch.cuda.is_available() else "cpu"), patch_type, allow_banned)
    return handle


def disable_casts() -> AbstractContextManager[None]:
    """Inside, O1 casts nothing."""
    return handle._disable_casts()


def _decorator(how: Cast) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not handle.is_active():
                return fn(*args, **kwargs)
            args, kwargs = as_listed(how, fn, args, kwargs, handle._half)
            # The user's cast goes before the list that the function is on.
            with disable_casts() if fn in cast_table() else nullcontext():
                return fn(*args, **kwargs)

        return wrapper

    decorate.__doc__ = f"A decorator. Under O1 floating-point arguments of `fn` are cast: {how.value}."
    return decorate


def _registration(how: Cast) -> Callable[[Any, str], None]:
    def register(module: Any, name: str) -> None:
        if not hasattr(module, name):
            raise SettingError(f"No function named {name} in module {module}: nothing can be cast for it")
        setattr(module, name, _decorator(how)(getattr(module, name)))

    register.__doc__ = f"Under O1 cast arguments of ``module.name``, if looked up there: {how.value}."
    return register


_LISTS = (Cast.HALF, Cast.FLOAT, Cast.WIDEST)
half_function, float_function, promote_function = map(_decorator, _LISTS)
register_half_function, register_float_function, register_promote_function = map(_registration, _LISTS)
