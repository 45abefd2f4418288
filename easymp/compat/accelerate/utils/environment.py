"""``accelerate.utils.environment``: variables, as scripts read them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from ....base import env
from ..layer import layer

__all__ = ["get_int_from_env", "parse_flag_from_env", "patch_environment", "str_to_bool"]
__getattr__ = layer.absent("accelerate.utils.environment", {}, lambda: __all__)


def str_to_bool(value: str) -> int:
    """1 or 0 for a word of yes or no. Raises ValueError for others."""
    word = str(value).lower()
    if word in env.TRUE or word in ("y", "t"):
        return 1
    if word in env.FALSE - {""} or word in ("n", "f"):
        return 0
    raise ValueError(f"{value!r} is neither yes nor no")


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    return bool(str_to_bool(env.read(key, str(default)) or "no"))


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """The first of these variables that is a number of at least 0."""
    found = (env.integer(key, -1) for key in env_keys)
    return next((number for number in found if number is not None and number >= 0), default)


def patch_environment(**kwargs: Any) -> AbstractContextManager[None]:
    """Inside, these variables are set; names in capitals."""
    return env.override(**{key.upper(): str(value) for key, value in kwargs.items()})
