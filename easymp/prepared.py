"""A prepared model: the user's own module, with another way to be called.

A view shares the module's ``__dict__``, so parameters, buffers, hooks, methods, attributes, ``state_dict`` names and
``isinstance`` are the module's own, and an assignment to one is seen by the other. Only its class differs: a subclass made for
it, whose ``__call__`` goes through autocast and the strategy's wrapper. Nothing is set on the user's module. Copies and
pickles of a view are of the module.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


class Route:
    """How a prepared model is called.

    Attributes:
        original: the user's module.
        module: what the strategy made of it.
        called: whether it has been called since the last reduced backward.
    """

    __slots__ = ("called", "module", "original")

    def __init__(self, original: nn.Module, module: nn.Module) -> None:
        self.original = original
        self.module = module
        self.called = False


def make_view(original: nn.Module, module: nn.Module) -> tuple[nn.Module, Route]:
    """The module a user calls in place of `original`; `original` itself where `module` is no other."""
    route = Route(original, module)
    if module is original:
        return original, route
    kind = type(original)

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        route.called = True
        return route.module(*args, **kwargs)

    def __deepcopy__(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(route.original, memo)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        return route.original.__reduce_ex__(protocol)

    body = {
        "__call__": __call__,
        "__deepcopy__": __deepcopy__,
        "__reduce_ex__": __reduce_ex__,
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "_easymp_route": route,
    }
    view = object.__new__(type(kind)(f"Prepared{kind.__name__}", (kind,), body))
    object.__setattr__(view, "__dict__", original.__dict__)
    return view, route


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
