"""Libraries that draw for themselves get a `random` module of their own.

Clients of object stores and trackers draw how long they wait before they try again, or a run's name, from Python's global stream, many
of them in threads of their own. Each such draw would shift what the training draws after it: a run whose store failed once would not
be the run whose store did not, and one that was resumed would not be the one that was not interrupted.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

GLOBAL = random.random.__self__  # the generator behind the module's functions


def keep_apart(packages: Iterable[str]) -> None:
    """From now on, what is loaded of `packages` draws from a stream that the operating system seeded, and not from Python's global one.

    It reaches modules that say ``import random`` or ``from random import uniform``, and functions whose defaults are such functions;
    not a name that is bound inside of an object. Modules that are imported later are not reached: call it after their import.
    """
    roots = set(packages)
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] in roots]:
        for name, value in list(vars(module).items()):
            own = _own(value)
            if own is not value:
                setattr(module, name, own)
            for function in _functions(value):
                function.__defaults__ = tuple(map(_own, function.__defaults__ or ())) or None


def _own(value: Any) -> Any:
    """What stands for `value`, if that is the module `random`, or a function of it; else `value`."""
    if value is random:
        return _module()
    if isinstance(value, BuiltinMethodType | MethodType) and value.__self__ is GLOBAL:
        return getattr(_module(), value.__name__)
    return value


def _functions(value: Any) -> Iterator[FunctionType]:
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, type):
        yield from (method for method in list(vars(value).values()) if isinstance(method, FunctionType))


@cache
def _module() -> ModuleType:
    """Python's `random` once more, beside the one that everybody shares."""
    module = importlib.util.module_from_spec(random.__spec__)
    random.__spec__.loader.exec_module(module)
    return module
