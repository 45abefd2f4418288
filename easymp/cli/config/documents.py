"""Configuration files of other libraries as keys and values: YAML, and JSON with comments."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import SettingError
from ..terminal import missing_packages

STRING = r'("(?:[^"\\\n]|\\.)*")'
COMMENT = re.compile(STRING + r"|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
LAST_COMMA = re.compile(STRING + r"|(?<=[^\s,\[{:])(\s*),(?=\s*[}\]])")


class Document(NamedTuple):
    """A file as keys and values."""

    name: str
    content: dict[str, Any]


def read_document(path: str | Path) -> Document:
    """The file at `path`: YAML by its suffix, else JSON if it begins with a brace, comments aside, else YAML."""
    name, path = str(path), Path(path)
    if not path.is_file():
        raise SettingError(f"{name!r} is not a file: pass one of Accelerate (YAML) or of DeepSpeed (JSON)")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{name!r} cannot be read as a text file: {error}") from error
    is_json = _without_comments(text).lstrip().startswith("{") and path.suffix.lower() not in (".yaml", ".yml")
    content = read_json(text, name) if is_json or path.suffix.lower() == ".json" else _read_yaml(text, name)
    if not isinstance(content, dict) or not content:
        raise SettingError(f"{name} holds no keys with values: pass a file of Accelerate or DeepSpeed")
    return Document(name, content)


def read_json(text: str, name: str) -> Any:
    """The value of JSON with comments and trailing commas; errors call the text `name`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_duplicates([key for key, _ in pairs], name)
        return dict(pairs)

    def finite(number: str) -> float:
        if not math.isfinite(float(number)):
            raise SettingError(f"{name}: {number} is not a finite number")
        return float(number)

    with _parsing(name, "JSON"):
        text = _without_comments(text.removeprefix("\ufeff"))
        text = LAST_COMMA.sub(lambda match: match[1] or match[2] + " ", text)
        return json.loads(text, object_pairs_hook=unique, parse_float=finite, parse_constant=finite)


def _without_comments(text: str) -> str:
    """JSON without ``//``, ``#`` and ``/* */``, which become spaces, so that lines keep their numbers."""
    return COMMENT.sub(lambda match: match[1] or re.sub(r"[^\n]", " ", match[0]), text)


def _read_yaml(text: str, name: str) -> Any:
    if sentence := missing_packages("yaml", "yaml"):
        raise SettingError(f"{name} is a YAML file, and {sentence}")
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            _refuse_duplicates([str(key.value) for key, _ in node.value], name)
            return super().construct_mapping(node, deep)

    with _parsing(name, "YAML"):
        try:
            if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):  # a few can mean billions
                raise SettingError(f"{name} has an alias (*), which no configuration needs: write the value")
            return yaml.load(text, Loader)  # a SafeLoader
        except yaml.YAMLError as error:
            raise ValueError(error) from error


@contextmanager
def _parsing(name: str, form: str) -> Iterator[None]:
    """Turn a parser's errors, also at numbers of thousands of digits and thousands of brackets, into SettingError."""
    try:
        yield
    except SettingError:
        raise
    except (ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise SettingError(f"{name}{line} is not valid {form}: {' '.join(str(error).split())}") from error


def _refuse_duplicates(keys: Sequence[str], name: str) -> None:
    for key in keys:
        if keys.count(key) > 1:
            raise SettingError(f"{name}: the key {key!r} stands twice in a section: keep one")
