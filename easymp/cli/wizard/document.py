"""A configuration file of another library, JSON or YAML, as plain data that knows its lines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.relaxed_json import located
from ...errors import SettingError

LONGEST = 10_000  # values in a file; aliases of YAML can make a few lines into billions
DEEPEST = 100


@dataclass(frozen=True)
class Document:
    """What stands in a file.

    Attributes:
        name: the path as it was given.
        content: its keys and values; lists and dicts inside one another.
        lines: of each value, by its path of keys and positions.
    """

    name: str
    content: dict[str, Any]
    lines: dict[tuple[str | int, ...], int]

    def where(self, *path: str | int) -> str:
        """``"default_config.yaml, line 3"``."""
        return f"{self.name}, line {self.lines[path]}" if path in self.lines else self.name


def read_document(path: str | Path) -> Document:
    """The file at `path`: YAML by its ending, else JSON if it begins with a brace, comments aside, else YAML.

    Raises:
        SettingError: there is no such file, or it is neither, or a key stands twice, or PyYAML is needed and missing.
    """
    name = str(path)
    if not Path(path).is_file():
        raise SettingError(
            f"{name!r} is no file: pass the path of a configuration of Accelerate (YAML) or of DeepSpeed (JSON)"
        )
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{name!r} cannot be read as a text file: {error}") from error
    if not text.strip():
        raise SettingError(
            f"{name} is empty: pass a configuration of Accelerate (YAML) or of DeepSpeed (JSON)"
        )
    ending = Path(path).suffix.lower()
    begun = next(
        (line for line in map(str.strip, text.splitlines()) if line and not line.startswith(("#", "//"))), ""
    )
    yaml = ending in (".yaml", ".yml") or (ending != ".json" and not begun.startswith(("{", "/*")))
    content, lines = _read_yaml(text, name) if yaml else located(text, name)
    if not isinstance(content, dict):
        raise SettingError(f"{name} holds a {type(content).__name__}, where keys with values were expected")
    return Document(name, content, lines)


def _read_yaml(text: str, name: str) -> tuple[Any, dict[tuple[str | int, ...], int]]:
    try:
        import yaml  # an extra
    except ModuleNotFoundError as error:
        raise SettingError(
            f"{name} is YAML, which PyYAML reads: pip install 'easymp[yaml]', or pyyaml"
        ) from error
    lines: dict[tuple[str | int, ...], int] = {}

    def walk(node: Any, path: tuple[str | int, ...]) -> None:
        lines.setdefault(path, node.start_mark.line + 1)
        if len(path) > DEEPEST or len(lines) > LONGEST:
            raise SettingError(
                f"{name}, line {lines[path]}: more values than a configuration has, or inside one another without end"
            )
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        for key, value in pairs:
            line, inside = key.start_mark.line + 1, (*path, str(key.value))
            if inside in lines:
                raise SettingError(
                    f"{name}, line {line}: the key {key.value!r} stands there before, on line {lines[inside]}: remove one of the two"
                )
            lines[inside] = line
            walk(value, inside)
        for number, value in enumerate(node.value) if isinstance(node, yaml.SequenceNode) else ():
            walk(value, (*path, number))

    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return {}, lines
        walk(node, ())
        return loader.construct_document(node), lines
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        raise SettingError(
            f"{name}{place} is not valid YAML: {getattr(error, 'problem', None) or error}"
        ) from error
    except ValueError as error:  # such as a date that there is not
        raise SettingError(f"{name} is not valid YAML: {error}") from error
    finally:
        loader.dispose()
