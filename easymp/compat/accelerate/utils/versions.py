"""``accelerate.utils.versions``."""

from __future__ import annotations

import importlib.metadata
import operator
import re

from ....errors import SettingError

__all__ = ["compare_versions", "is_torch_version"]

COMPARED = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


def compare_versions(library_or_version: str, operation: str, requirement_version: str) -> bool:
    """Whether an installed package, or a version, is ``"<"``, ``">="`` … `requirement_version`, by the numbers of both."""
    if operation not in COMPARED:
        raise SettingError(f"operation={operation!r} is not one of {', '.join(COMPARED)}")
    given = str(library_or_version)
    version = given if given[:1].isdigit() else importlib.metadata.version(given)
    mine, other = _numbers(version), _numbers(requirement_version)
    width = max(len(mine), len(other))
    return bool(COMPARED[operation](mine + (0,) * (width - len(mine)), other + (0,) * (width - len(other))))


def is_torch_version(operation: str, version: str) -> bool:
    return compare_versions("torch", operation, version)


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()
