"""TOML features that tomllib lacks: the positions of statements in a file, and single values."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

NAME = r"""(?:"[^"\n]*"|'[^'\n]*'|[\w-]+)"""
DOTTED = rf"({NAME}(?:[ \t]*\.[ \t]*{NAME})*)[ \t]*"
STATEMENT = re.compile(rf"[ \t]*(?:\[\[?[ \t]*{DOTTED}\]|{DOTTED}=[ \t]*)")


class Statement(NamedTuple):
    """A key with its value, or a header of a table; and its places in the text.

    Attributes:
        table: of the header above it, or its own: ``("launch",)``.
        keys: from the top: ``("launch", "processes")``; of a header ().
        begin, start, stop, end: positions of the line, of the value, after the value, and after the value's last line.
    """

    table: tuple[str, ...]
    keys: tuple[str, ...]
    begin: int
    start: int
    stop: int
    end: int


def statements(text: str) -> Iterator[Statement]:
    """The statements of a TOML file whose last line has an end, in order."""
    at, table = 0, tuple[str, ...]()
    while at < len(text):
        end, found = text.index("\n", at), STATEMENT.match(text, at)
        if found:
            own = tuple(part.strip("\"'") for part in re.findall(NAME, found[1] or found[2]))
            table = own if found[1] else table
            stop = end if found[1] else _value_end(text, found.end())
            end = text.index("\n", stop)
            yield Statement(table, () if found[1] else (*table, *own), at, found.end(), stop, end + 1)
        at = end + 1


def _value_end(text: str, start: int) -> int:
    """The first place before a comment or the end of a line where ``text[start:]`` is valid TOML."""
    for found in re.finditer(r"[ \t]*(?=[#\n])", text[start:]):
        with suppress(tomllib.TOMLDecodeError):
            tomllib.loads(f"value = {text[start : start + found.start()]}")
            return start + found.start()
    return text.index("\n", start)


def read_literal(text: str) -> Any:
    """Parse a value in TOML or JSON; return any other text as it is."""
    with suppress(tomllib.TOMLDecodeError, RecursionError):
        return tomllib.loads(f"value = {text}")["value"]
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return text
