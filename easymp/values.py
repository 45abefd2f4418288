"""One setting as a field of a record, and what a given value must be to become its value."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import field
from typing import Any

from . import env
from .errors import SettingError, nearest

Size = int  # bytes; said as a number or in words: 16e9, "16GiB", "500 MB"
UNITS = {
    f"{letter}{i}b".lower(): base**n
    for n, letter in enumerate(("", *"kmgt"))
    for i, base in (("", 1000), ("i", 1024))
}


def setting(
    default: Any,
    help: str,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """A field of a record of settings: default, one sentence of help, allowed words, smallest and largest number.

    Its type is one of str, int, float, bool and `Size`, or one of them and None; a str without `choices` is any text, or a whole number.
    """
    return field(default=default, metadata={"help": help, "choices": choices, "least": least, "most": most})


def checked(f: dataclasses.Field[Any], value: Any, where: str) -> Any:
    """`value` in the field's own type, or a SettingError that begins with `where`."""
    kind = str(f.type).split(" ")[0]
    if value is None and f.default is None:
        return None
    if kind == "bool":
        return _yes_or_no(value, where)
    if kind == "Size":
        return read_bytes(value, where)
    if kind in ("int", "float"):
        return _number(f, kind, value, where)
    return _word(f.metadata["choices"], value, where)


def _yes_or_no(value: Any, where: str) -> bool:
    if isinstance(value, str) and value.lower() in env.TRUE | env.FALSE:
        return value.lower() in env.TRUE
    if isinstance(value, bool):
        return value
    raise SettingError(f"{where}{value!r} is neither yes nor no: use true or false")


def _number(f: dataclasses.Field[Any], kind: str, value: Any, where: str) -> float:
    least, most = f.metadata["least"], f.metadata["most"]
    number = {"int": int, "float": float}[kind]
    try:
        if isinstance(value, bool) or (kind == "int" and float(value) != int(float(value))):
            raise ValueError
        value = number(value)
        if value != value:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise SettingError(f"{where}{value!r} is not a {'whole ' if kind == 'int' else ''}number") from None
    if least is not None and not value >= least:
        raise SettingError(f"{where}{value!r} is below the smallest possible value, {least:g}")
    if most is not None and value > most:
        raise SettingError(f"{where}{value!r} is above the largest possible value, {most:g}")
    return value


def _word(choices: tuple[str, ...], value: Any, where: str) -> str:
    if not choices and isinstance(value, int) and not isinstance(value, bool):
        return str(value)  # nodes = 2
    if not isinstance(value, str):
        one_of = f": one of {', '.join(choices)}" if choices else ""
        raise SettingError(
            f"{where}{value!r} is of type {type(value).__name__}, but a word is needed{one_of}"
        )
    if not choices:
        return value
    words = {choice.lower(): choice for choice in choices}
    if value.lower() not in words:
        raise SettingError(f"{where}{value!r} is not one of {', '.join(choices)}{nearest(value, choices)}")
    return words[value.lower()]


def read_bytes(value: Any, where: str) -> int:
    """A size as a number or in words; `where` begins the message of the error that says it is none."""
    found = (
        None
        if isinstance(value, bool)
        else re.fullmatch(r"\s*([0-9.]+(?:e\+?[0-9]+)?)\s*([a-z]*)\s*", str(value).lower())
    )
    try:
        number = int(float(found[1]) * UNITS[found[2] or "b"]) if found else 0
    except (KeyError, ValueError, OverflowError):
        number = 0
    if number < 1:
        raise SettingError(
            f"{where}{value!r} is no size: use a number of bytes, or one with a unit, such as 16GiB or 16GB"
        )
    return number
