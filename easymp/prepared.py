"""A prepared model: the user's own module, with another way to be called.

A view shares the module's ``__dict__``, so parameters, buffers, hooks, methods, attributes, ``state_dict`` names and
``isinstance`` are the module's own, and an assignment to one is seen by the other. Only its class differs: a subclass made for
it, whose ``__call__`` goes through autocast and the strategy's wrapper. Nothing is set on the user's module. Copies of a
view, for this process or another, are of the module. Where its class has none, ``module`` is the user's module and ``no_sync()`` keeps
gradients to this rank, as DistributedDataParallel's wrapper has them.
"""

from __future__ import annotations

import copy
from abc import ABCMeta
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import MemberDescriptorType
from typing import Any

from torch import nn

from .strategies.framed import Alone


class Route:
    """How a prepared model is called.

    Attributes:
        original: the user's module.
        module: what the strategy made of it.
        called: whether it has been called since the last reduced backward.
        local: whether its gradients stay with this rank, however it is called.
        no_sync: inside what it gives, they do for a while.
    """

    __slots__ = ("called", "local", "module", "no_sync", "original")

    def __init__(
        self, original: nn.Module, module: nn.Module, no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self.original = original
        self.module = module
        self.no_sync = no_sync
        self.called = False
        self.local = isinstance(module, Alone)


def make_view(
    original: nn.Module,
    module: nn.Module,
    explain: Callable[[RuntimeError, str], None] = lambda error, what: None,
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[nn.Module, Route]:
    """The module a user calls in place of `original`; `original` itself where `module` is no other.

    Args:
        explain: told of an error in a call, which may hold collectives; raises one that says more, if it can.
        no_sync: what the view's `no_sync` is, where its class has none: scripts for DistributedDataParallel call that of its wrapper.
    """
    route = Route(original, module, no_sync)
    if module is original:
        return original, route
    kind = next(c for c in type(original).__mro__ if c is not _View and "_easymp_route" not in vars(c))  # also of a view

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        route.called = True
        try:
            return route.module(*args, **kwargs)
        except RuntimeError as error:
            explain(error, "forward")
            raise

    body = {"__call__": __call__, "__module__": kind.__module__, "__doc__": kind.__doc__, "_easymp_route": route}
    body.update((slot, _forwarded(original, slot)) for slot in _slots(kind))
    # The class is nobody's business: a metaclass or __init_subclass__ that keeps a register, or wants arguments, is passed by.
    meta = type(kind)
    make: Any = ABCMeta.__new__ if issubclass(meta, ABCMeta) else type.__new__
    view = object.__new__(make(meta, f"Prepared{kind.__name__}", (_View, kind), body))
    object.__setattr__(view, "__dict__", original.__dict__)
    return view, route


class _View:
    """What all views do alike, before their own class is asked."""

    __slots__ = ()
    _easymp_route: Route

    def __init_subclass__(cls, **_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            if name == "module":  # as the wrapper of DistributedDataParallel has it
                return self._easymp_route.original
            if name == "no_sync":
                return self._easymp_route.no_sync
            raise

    def __copy__(self) -> nn.Module:
        return copy.copy(self._easymp_route.original)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self._easymp_route.original, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _itself, (self._easymp_route.original,)


def _itself(module: nn.Module) -> nn.Module:
    """What making a copy of a view calls."""
    return module


def _slots(kind: type) -> Iterator[str]:
    """Names of attributes that live outside ``__dict__``."""
    for base in kind.__mro__:
        for name, member in vars(base).items():
            if type(member) is MemberDescriptorType:
                yield name


def _forwarded(original: nn.Module, name: str) -> property:
    return property(
        lambda _: getattr(original, name), lambda _, value: setattr(original, name, value), lambda _: delattr(original, name)
    )


def unwrap(model: nn.Module, keep_torch_compile: bool = True) -> nn.Module:
    """The user's module behind a view, DataParallel or DistributedDataParallel; also behind torch.compile, if asked."""
    while True:
        route = getattr(type(model), "_easymp_route", None)
        if route is not None:
            model = route.original
        elif isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif not keep_torch_compile and "_orig_mod" in model._modules:
            model = model._modules["_orig_mod"]
        else:
            return model
