"""The process environment, and the script that this process runs. No other module of easymp reads or writes it.

Names easymp owns start with ``EASYMP_``; the launch variables (``RANK``, ``WORLD_SIZE`` …) are torchrun's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import overload

from ..errors import SettingError

PREFIX = "EASYMP_"
TRUE = frozenset({"1", "true", "yes", "on"})
FALSE = frozenset({"0", "false", "no", "off", ""})


@overload
def read(name: str) -> str | None: ...
@overload
def read(name: str, default: str) -> str: ...
def read(name: str, default: str | None = None) -> str | None:
    """The variable's text, or `default` where it is not set."""
    return os.environ.get(name, default)


def flag(name: str, default: bool) -> bool:
    """A yes-or-no variable. Raises SettingError for other words."""
    text = os.environ.get(name)
    if text is None:
        return default
    if text.lower() in TRUE:
        return True
    if text.lower() in FALSE:
        return False
    raise SettingError(f"{name}={text!r} in the environment is neither yes nor no: use 1 or 0")


@overload
def integer(name: str) -> int | None: ...
@overload
def integer(name: str, default: int) -> int: ...
def integer(name: str, default: int | None = None) -> int | None:
    """A whole number. Raises SettingError for anything else."""
    text = os.environ.get(name)
    if text is None or text == "":
        return default
    try:
        return int(text)
    except ValueError:
        raise SettingError(f"{name}={text!r} in the environment is not a whole number") from None


def names(prefix: str) -> list[str]:
    """Names of the variables that start with `prefix`, sorted."""
    return sorted(n for n in os.environ if n.startswith(prefix))


def merged(changes: Mapping[str, str]) -> dict[str, str]:
    """A copy of the environment with `changes`, for a child process."""
    return {**os.environ, **changes}


def put(changes: Mapping[str, str | None]) -> dict[str, str | None]:
    """Set (or with None remove) variables for good; returns the values before."""
    before = {name: os.environ.get(name) for name in changes}
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return before


@contextmanager
def override(**changes: str | None) -> Iterator[None]:
    """Set (or with None remove) variables inside a ``with`` block."""
    before = put(changes)
    try:
        yield
    finally:
        put(before)


def script() -> str | None:
    """Path of the file, or name of the module, that this process runs; None in a notebook."""
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return str(spec.name.removesuffix(".__main__"))
    return None if path is None or not os.path.isfile(path) else os.path.abspath(path)
