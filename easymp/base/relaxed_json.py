"""JSON as people write it in configurations: with comments and trailing commas, and strict in all else.

``//`` and ``#`` begin a comment that ends with the line, ``/*`` one that ends with ``*/``; inside strings they are text. What is refused
is what would be lost or misread: a key that stands twice, NaN and infinity. Every error names the line.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from ..errors import SettingError

TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|\#[^\n]*|/\*.*?\*/)
    |(?P<string>"(?:[^"\\\n]|\\.)*")
    |(?P<mark>[{}\[\],:])
    |(?P<word>(?:(?!//|/\*)[^\s{}\[\],:"\#])+)""",
    re.VERBOSE | re.DOTALL,
)
DEEPEST = 100  # levels of nesting; a configuration has a few
Path = tuple[str | int, ...]


def loads(text: str, name: str) -> Any:
    """The value that `text` spells; `name` is what errors call the text.

    Raises:
        SettingError: it is not JSON, apart from comments and trailing commas; or a key stands twice, or a number is not finite.
    """
    return located(text, name)[0]


def located(text: str, name: str) -> tuple[Any, dict[Path, int]]:
    """What `loads` returns, and the line of each value by its path of keys and positions, such as ``("fp16", "enabled")``."""
    reader = _Reader(text, name)
    value = reader.value(())
    kind, word, line = reader.next()
    if kind:
        raise SettingError(
            f"{name}, line {line}: {word!r} after the end of the JSON value: remove it, or join the two"
        )
    return value, reader.lines


class _Reader:
    """Walks over the tokens of a text once."""

    def __init__(self, text: str, name: str) -> None:
        self._text, self._name = text.removeprefix("\ufeff"), name
        self._at, self._line = 0, 1
        self.lines: dict[Path, int] = {}

    def next(self) -> tuple[str, str, int]:
        """Kind, text and line of the next token; an empty kind at the end."""
        while self._at < len(self._text):
            found, line = TOKEN.match(self._text, self._at), self._line
            if found is None:
                begun = self._text[self._at : self._at + 20].splitlines()[0]
                what = {'"': "a string that does not end on its line", "/": "a comment that does not end"}
                raise self._wrong(line, f"{begun!r} begins {what.get(begun[0], 'nothing that JSON has')}")
            self._at, self._line = found.end(), line + found[0].count("\n")
            if found.lastgroup != "space":
                return str(found.lastgroup), found[0], line
        return "", "", self._line

    def value(self, path: Path, token: tuple[str, str, int] | None = None) -> Any:
        kind, word, line = token or self.next()
        self.lines[path] = line
        if len(path) > DEEPEST:
            raise self._wrong(line, f"values are nested deeper than {DEEPEST} levels")
        if word == "{":
            return self._object(path)
        if word == "[":
            return self._array(path)
        if kind == "string":
            return self._string(word, line)
        if kind == "word":
            return self._plain(word, line)
        raise self._wrong(line, f"{repr(word) if word else 'the text ends'} where a value should stand")

    def _object(self, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while (token := self.next())[1] != "}" or token[0] != "mark":
            kind, word, line = token
            if kind != "string":
                raise self._wrong(
                    line,
                    f'{repr(word) if word else "the text ends"} where a key in quotes, or "}}", should stand',
                )
            key = self._string(word, line)
            if key in found:
                raise self._wrong(
                    line,
                    f"the key {key!r} stands there before, on line {self.lines[*path, key]}: remove one of the two",
                )
            colon = self.next()
            if colon[:2] != ("mark", ":"):
                raise self._wrong(colon[2], f"no ':' after the key {key!r}")
            found[key] = self.value((*path, key))
            self.lines[*path, key] = line  # the key's, where the value begins on another
            if self._ends("}"):
                break
        return found

    def _array(self, path: Path) -> list[Any]:
        found: list[Any] = []
        while (token := self.next())[:2] != ("mark", "]"):
            found.append(self.value((*path, len(found)), token))
            if self._ends("]"):
                break
        return found

    def _ends(self, mark: str) -> bool:
        """After a value: whether what it stands in ends; else there was a comma."""
        kind, word, line = self.next()
        if kind != "mark" or word not in (",", mark):
            raise self._wrong(
                line, f"{repr(word) if kind else 'the text ends'} where ',' or {mark!r} should stand"
            )
        return word == mark

    def _string(self, word: str, line: int) -> str:
        try:
            return str(json.loads(word))
        except json.JSONDecodeError as error:
            raise self._wrong(line, f"{word} is no string of JSON ({error.msg})") from error

    def _plain(self, word: str, line: int) -> Any:
        try:
            value = json.loads(word)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError
            return value
        except ValueError:  # JSONDecodeError, and whole numbers of thousands of digits
            shown = word if len(word) < 40 else f"{word[:37]}..."
            raise self._wrong(
                line, f"{shown!r} is neither a finite number nor true, false, null or a string in quotes"
            ) from None

    def _wrong(self, line: int, why: str) -> SettingError:
        return SettingError(f"{self._name}, line {line}: {why}")
