"""Values put into a file that people wrote: only the lines of these values change.

A file is cut into its statements: a statement is the fewest lines from its first on that are TOML by themselves, which makes tomllib
the judge of strings and arrays of several lines. What comes out is parsed again and must be what went in, but for the new values.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import SettingError
from ...settings import LAUNCH, LAUNCHING, checked
from .case import KNOWN
from .toml import HERE, MORE, block, here, literal, unset

# A value on one line: a string of either kind, or anything up to a comment.
VALUE = r"""(\"{3}.*?\"{3}|'{3}.*?'{3}|"(?:[^"\\]|\\.)*"|'[^']*'|[^#\s,}]+)"""


@dataclass(frozen=True)
class Statement:
    """Lines `start` to `end` of a file (counted from 0, `end` not included) that set something.

    Attributes:
        table: under whose header it stands; "" at the top.
        content: what it says by itself.
    """

    start: int
    end: int
    table: str
    content: Mapping[str, Any]


def edit(text: str, values: Mapping[str, Any], whys: Mapping[str, str]) -> str:
    """`text` with these values; None comments a setting out. What is so already stays as it is written.

    Raises:
        SettingError: a setting is written in a way that is not known here.
    """
    wanted = tomllib.loads(text)
    open_ = {
        name: value
        for name, value in values.items()
        if not _is(name, _table_of(name, wanted).get(name), value)
    }
    if not open_:
        return text
    ending = "\r\n" if "\r\n" in text else "\n"
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []
    for name, value in open_.items():
        lines = _without(lines, name) if value is None else _with(lines, name, value, whys.get(name, ""))
        _table_of(name, wanted)[name] = (
            None if value is None else tomllib.loads(f"x = {literal(KNOWN[name], value)}")["x"]
        )
    edited = "\n".join([*lines, ""])
    if _said(_parsed([edited]) or {}) != _said(wanted):
        said = ", ".join(
            f"{name} = {literal(KNOWN[name], value)}" for name, value in open_.items() if value is not None
        )
        taken = ", ".join(name for name, value in open_.items() if value is None)
        todo = "; ".join(word for word in (said and f"set {said}", taken and f"take away {taken}") if word)
        raise SettingError(f"the file is written in a way that cannot be edited from here; by hand, {todo}")
    return edited.replace("\n", ending)


def _table_of(name: str, content: dict[str, Any]) -> dict[str, Any]:
    """Where `name` stands in a parsed file."""
    found: dict[str, Any] = content.setdefault(LAUNCH, {}) if name in LAUNCHING else content
    return found


def _said(content: Mapping[str, Any]) -> dict[str, Any]:
    """What a parsed file sets; a table without anything is none."""
    own = {name: value for name, value in content.get(LAUNCH, {}).items() if value is not None}
    top = {name: value for name, value in content.items() if value is not None and name != LAUNCH}
    return {**top, LAUNCH: own}


def _is(name: str, written: Any, value: Any) -> bool:
    if written is None or value is None:
        return written is value
    return bool(checked(KNOWN[name], written, "") == value)


def _statements(lines: list[str]) -> Iterator[Statement]:
    table, start = "", 0
    while start < len(lines):
        words = lines[start].strip()
        end = start + 1
        if words.startswith("["):
            table = next(iter(tomllib.loads(words)))
            yield Statement(start, end, table, {})
        elif words and not words.startswith("#"):
            while (content := _parsed(lines[start:end])) is None and end < len(lines):
                end += 1
            yield Statement(start, end, table, content or {})
        start = end


def _parsed(lines: list[str]) -> dict[str, Any] | None:
    try:
        return tomllib.loads("\n".join(lines))
    except tomllib.TOMLDecodeError:
        return None


def _find(lines: list[str], name: str) -> Statement | None:
    """The statement that sets `name`, under its header, by a dotted key, or in an inline table."""
    table = LAUNCH if name in LAUNCHING else ""
    for each in _statements(lines):
        if (each.table == table and name in each.content) or (
            table and not each.table and name in each.content.get(LAUNCH, {})
        ):
            return each
    return None


def _inline(lines: list[str], statement: Statement) -> bool:
    """Whether it is the whole table on a line: ``launch = {...}``."""
    return (
        not statement.table
        and re.match(rf"""\s*["']?{LAUNCH}["']?\s*=""", lines[statement.start]) is not None
    )


def _without(lines: list[str], name: str) -> list[str]:
    found = _find(lines, name)
    if found is None:  # a line before it was written in a way not known here: what comes of that is not taken
        return lines
    if _inline(lines, found):
        table = {key: value for key, value in found.content[LAUNCH].items() if key != name}
        return [*lines[: found.start], _table(lines, found, table), *lines[found.end :]]
    own = [f"# {line}" for line in lines[found.start : found.end]]
    if (
        found.table == (LAUNCH if name in LAUNCHING else "")
        and len(own) == 1
        and "#" not in lines[found.start]
    ):
        own = [unset(name)]
    return [*lines[: _reason(lines, found.start)], *own, *lines[found.end :]]


def _with(lines: list[str], name: str, value: Any, why: str) -> list[str]:
    found = _find(lines, name)
    if found is None:
        return _added(lines, name, value, why)
    if _inline(lines, found):
        return [
            *lines[: found.start],
            _table(lines, found, {**found.content[LAUNCH], name: value}),
            *lines[found.end :],
        ]
    own = [
        re.sub(
            rf"""(\b{name}["']?\s*=\s*){VALUE}""",
            lambda m: m[1] + literal(KNOWN[name], value),
            lines[found.start],
            count=1,
        )
    ]
    if found.end > found.start + 1:
        comment = re.search(r"""(?:"{3}|'{3})\s*(#.*)$""", lines[found.end - 1])
        own = [f"{name} = {literal(KNOWN[name], value)}" + (f"  {comment[1]}" if comment else "")]
    start = _reason(lines, found.start)
    reason = here(why) if start < found.start else []
    return [*lines[:start], *reason, *own, *lines[found.end :]]


def _reason(lines: list[str], at: int) -> int:
    """Where our comment begins that says why the value in line `at` was taken; `at` without one."""
    above = at
    while above > 0 and lines[above - 1].startswith(MORE):
        above -= 1
    return above - 1 if above > 0 and lines[above - 1].startswith(HERE) else at


def _table(lines: list[str], statement: Statement, values: Mapping[str, Any]) -> str:
    """The inline table of `launch` with these values, and the comment behind it."""
    comment = re.search(r"}\s*(#.*)?$", lines[statement.end - 1])
    inside = ", ".join(f"{name} = {literal(KNOWN[name], value)}" for name, value in values.items())
    return f"{LAUNCH} = {{ {inside} }}" + (f"  {comment[1]}" if comment and comment[1] else "")


def _added(lines: list[str], name: str, value: Any, why: str) -> list[str]:
    """A setting that is not there yet: in place of the line that shows its default, or after its table's last one."""
    statements = list(_statements(lines))
    below = [each for each in statements if each.table == LAUNCH]
    header = below[0].start if below else len(lines)
    first, last = (header, len(lines)) if name in LAUNCHING else (0, header)
    if unset(name) in lines[first:last]:
        at = lines.index(unset(name), first)
        return [
            *lines[: _reason(lines, at)],
            *here(why),
            f"{name} = {literal(KNOWN[name], value)}",
            *lines[at + 1 :],
        ]
    if name not in LAUNCHING:
        top = [each.end for each in statements if not each.table]
        at = top[-1] if top else _head(lines)
        return [*lines[:at], *_apart(lines[:at], block(name, value, why)), *_gap(lines[at:])]
    if below:
        at = below[-1].end
        return [*lines[:at], *block(name, value, why), *lines[at:]]
    dotted = [each for each in statements if LAUNCH in each.content]
    if dotted and _inline(lines, dotted[-1]):
        table = {**dotted[-1].content[LAUNCH], name: value}
        return [*lines[: dotted[-1].start], _table(lines, dotted[-1], table), *lines[dotted[-1].end :]]
    if dotted:
        at = dotted[-1].end
        return [*lines[:at], f"{LAUNCH}.{name} = {literal(KNOWN[name], value)}", *lines[at:]]
    return [*lines, *_apart(lines, [f"[{LAUNCH}]", *block(name, value, why)])]


def _head(lines: list[str]) -> int:
    """The end of the comment with which the file begins, if it stands alone."""
    at = 0
    while at < len(lines) and lines[at].startswith("#"):
        at += 1
    return at if at < len(lines) and not lines[at].strip() else 0


def _apart(before: list[str], lines: list[str]) -> list[str]:
    return ["", *lines] if before and before[-1].strip() else lines


def _gap(after: list[str]) -> list[str]:
    return ["", *after] if after and after[0].strip() else after
