"""Configuration files of other libraries: read as keys and values, and turned into settings by tables of rules.

A rule says the meaning of a key's value here. A text is the sentence to print (sentences.toml has most of them); a function
takes settings and returns the sentence; a mapping holds the rules of a section. Every key of a file gets its sentence.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, Union

from ...base import env
from ...errors import SettingError, nearest
from ...registry import STRATEGIES
from ...settings import LAUNCHING, NAMES, as_table, checked

Rule = Callable[["Importer", Any], str]
Rules = Mapping[str, Union[Rule, str, "Rules"]]
OFF = "nothing to take: off"
AUTO = "nothing to take: auto, so the script says it"
CLIP = "in the script: accelerator.clip_grad_norm_(model.parameters(), {value}) before optimizer.step()"
KNOWN = {**NAMES, **LAUNCHING}
SENTENCES = tomllib.loads(Path(__file__).with_name("sentences.toml").read_text(encoding="utf-8"))

# -- reading


class Document(NamedTuple):
    """A file as keys and values; `text` (of JSON without comments) gives line numbers."""

    name: str
    content: dict[str, Any]
    text: str

    def where(self, path: tuple[str, ...]) -> str:
        """``"default_config.yaml, line 3"``."""
        at = 0
        for key in path:
            found = _key(key).search(self.text, at)
            if found is None:
                return self.name
            at = found.end()
        return f"{self.name}, line {self.text.count(chr(10), 0, at) + 1}"


def read_document(path: str | Path) -> Document:
    """The file at `path`: YAML by its ending, else JSON if it begins with a brace, comments aside, else YAML."""
    name, place = str(path), Path(path)
    if not place.is_file():
        raise SettingError(f"{name!r} is not a file: pass one of Accelerate (YAML) or of DeepSpeed (JSON)")
    try:
        text = place.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{name!r} cannot be read as a text file: {error}") from error
    plain, ending = _without_comments(text), place.suffix.lower()
    yaml = ending in (".yaml", ".yml") or (ending != ".json" and not plain.lstrip().startswith("{"))
    content = _read_yaml(text, name) if yaml else read_json(text, name)
    if not isinstance(content, dict) or not content:
        raise SettingError(f"{name} holds no keys with values: pass a file of Accelerate or DeepSpeed")
    return Document(name, content, text if yaml else plain)


@contextmanager
def _parsing(name: str, form: str) -> Iterator[None]:
    """Errors of a parser, such as numbers of thousands of digits and thousands of brackets, as SettingError."""
    try:
        yield
    except SettingError:
        raise
    except (ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise SettingError(f"{name}{line} is not valid {form}: {' '.join(str(error).split())}") from error


def read_json(text: str, name: str) -> Any:
    """The value of JSON with comments and trailing commas; errors call the text `name`."""
    plain = _without_comments(text.removeprefix("\ufeff"))

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_twice([key for key, _ in pairs], plain, name)
        return dict(pairs)

    def finite(word: str) -> float:
        if not math.isfinite(float(word)):
            raise SettingError(f"{name}: {word} is not a finite number")
        return float(word)

    text = LAST_COMMA.sub(lambda m: m[1] or m[2] + " ", plain)
    with _parsing(name, "JSON"):
        return json.loads(text, object_pairs_hook=unique, parse_float=finite, parse_constant=finite)


STRING = r'("(?:[^"\\\n]|\\.)*")'
COMMENT = re.compile(STRING + r"|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
LAST_COMMA = re.compile(STRING + r"|(?<=[^\s,\[{:])(\s*),(?=\s*[}\]])")


def _without_comments(text: str) -> str:
    """JSON without ``//``, ``#`` and ``/* */``, which become spaces, so that lines keep their numbers."""
    return COMMENT.sub(lambda m: m[1] or re.sub(r"[^\n]", " ", m[0]), text)


def _read_yaml(text: str, name: str) -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise SettingError(f"{name} is YAML, which PyYAML reads: pip install 'easymp[yaml]'") from error

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):  # a few lines of them can stand for billions of values
                raise SettingError(f"{name} has an alias (*), which no configuration needs: write the value")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            _refuse_twice([str(key.value) for key, _ in node.value], text, name)
            return super().construct_mapping(node, deep)

    with _parsing(name, "YAML"):
        try:
            return yaml.load(text, Loader)  # a SafeLoader
        except yaml.YAMLError as error:
            raise ValueError(error) from error


def _key(key: str) -> re.Pattern[str]:
    return re.compile(rf"""(?<!\w)["']?{re.escape(key)}["']?\s*:""")


def _refuse_twice(keys: list[str], text: str, name: str) -> None:
    for key in keys:
        if keys.count(key) > 1:
            lines = [str(text.count("\n", 0, match.start()) + 1) for match in _key(key).finditer(text)]
            where = f", line {lines[-1]}" if lines else ""
            at = ", ".join(lines)
            raise SettingError(f"{name}{where}: the key {key!r} stands twice (lines {at}): keep one")


# -- applying a table of rules


class Importer:
    """The settings taken from files so far. A `strategy` of None is "auto", which has no options."""

    def __init__(self, document: Document, library: str, strategy: str | None) -> None:
        self.values: dict[str, Any] = {}  # of settings by name, those of `easymp launch` too
        self.lines: list[tuple[str, str]] = []  # a key with its value, and the sentence about it
        self.path: tuple[str, ...] = ()  # of the current key
        self.library = library
        self.begin(document, library, strategy)

    def begin(self, document: Document, library: str, strategy: str | None) -> None:
        """Go on with another file, which the one before named."""
        self.document, self._format, self.strategy = document, library, strategy

    def walk(self, content: Mapping[str, Any], rules: Rules, path: tuple[str, ...] = ()) -> None:
        """Apply `rules` to each key of `content`, the section of the document at `path`."""
        idle = "enabled" in rules and content.get("enabled") is not True
        for key, value in content.items():
            key, self.path = str(key), (*path, str(key))
            rule = rules.get(key)
            if isinstance(rule, Mapping) and isinstance(value, Mapping) and value:
                self.walk(value, rule, self.path)
            else:
                said = f"nothing to take: {path[-1]} is not enabled" if idle and key != "enabled" else ""
                sentence = self._apply(key, value, rules, said)
                self.lines.append((f"{'.'.join(self.path)}: {spelled(value)}", sentence))

    def _apply(self, key: str, value: Any, rules: Rules, said: str) -> str:
        rule = rules.get(key)
        if rule is None:
            section = f" in {'.'.join(self.path[:-1])}" if self.path[1:] else ""
            return f"unknown, nothing taken: {self._format} has no {key!r}{section}{nearest(key, rules)}"
        if said or (is_off(value) and not hasattr(rule, "also_off")):
            return said or OFF
        if isinstance(rule, str):
            return rule.replace("{value}", spelled(value))
        if value == "auto":
            return AUTO
        if isinstance(rule, Mapping):
            raise self.wrong(value, "is not a group of keys")
        return rule(self, value)

    def set(self, name: str, value: Any) -> str:
        """Take a setting."""
        value = checked(KNOWN[name], value, f"{self.where()}: {self.path[-1]} = ")
        if self.values.setdefault(name, value) != value:
            raise SettingError(
                f"{self.where()}: {'.'.join(self.path)} would be {name} = {json.dumps(value)}, but another line of "
                f"the file says {json.dumps(self.values[name])}: remove one of the two"
            )
        return f"{'[launch] ' * (name in LAUNCHING)}{name} = {json.dumps(value)}"

    def option(self, **options: Any) -> str:
        """Take options of the strategy."""
        if self.strategy is None:
            return "nothing to take: strategy stays auto, which has no options"
        if unknown := options.keys() - self.known_options:
            return f"no counterpart: strategy {self.strategy} has no option {min(unknown)}"
        return self.table("strategy_options", **options)

    @property
    def known_options(self) -> set[str]:
        return {f.name for f in fields(STRATEGIES[self.strategy].Options)} if self.strategy else set()

    def table(self, name: str, **options: Any) -> str:
        """Take options of a table."""
        found = {**as_table(self.values.get(name)), **options}
        self.values[name] = found["what"] if found.keys() == {"what"} else found  # the word of `compile`
        return f"[{name}] " + ", ".join(f"{k} = {json.dumps(v)}" for k, v in options.items())

    def number(self, value: Any, least: float = 0, whole: bool = False) -> Any:
        """`value`, if it is such a number. YAML reads 1e8 as a text."""
        try:
            value = float(value) if isinstance(value, str) else value
        except ValueError:
            raise self.wrong(value, "is not a number") from None
        if whole and isinstance(value, float) and value.is_integer():
            value = int(value)
        good = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not (good and least <= value < float("inf")):
            raise self.wrong(value, f"is not a {'whole ' * whole}number of at least {least:g}")
        return value

    def yes(self, value: Any) -> bool:
        word = str(value).lower()
        if word not in env.TRUE | env.FALSE:
            raise self.wrong(value, "is neither yes nor no")
        return word in env.TRUE

    def wrong(self, value: Any, why: str) -> SettingError:
        return SettingError(f"{self.where()}: {'.'.join(self.path)} = {spelled(value)} {why}")

    def where(self) -> str:
        return self.document.where(self.path)


# -- rules of both libraries


def table(library: str, section: str = "", **rules: Rule | str | Rules) -> Rules:
    """The rules of a section of a library's files: `rules`, and the sentences of ``sentences.toml``."""
    found = SENTENCES[library].get(section, {}) if section else SENTENCES[library]
    sentences = ((keys, sentence) for sentence, keys in found.items() if isinstance(keys, str))
    return {**{key: sentence for keys, sentence in sentences for key in keys.split()}, **rules}


def also_off(rule: Rule) -> Rule:
    """Mark a rule that is also asked about values that mean "off"."""
    rule.also_off = True  # type: ignore[attr-defined]
    return rule


def is_off(value: Any) -> bool:
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    return value == [] or value is None or str(value).lower() in env.FALSE | {"none"}


def switch(name: str, on: Any = True) -> Rule:
    """A rule for yes or no: yes sets `name`."""
    return lambda take, value: take.set(name, on) if take.yes(value) else OFF


def clip(take: Importer, value: Any) -> str:
    return CLIP.format(value=take.number(value))


@also_off
def accumulate(take: Importer, value: Any) -> str:
    return AUTO if value == "auto" else take.set("gradient_accumulation_steps", value)


def call(name: str, arguments: Mapping[str, Any], first: str = "") -> str:
    """A call in Python, as text."""
    return f"{name}({', '.join([*filter(None, [first]), *(f'{k}={v!r}' for k, v in arguments.items())])})"


def spelled(value: Any) -> str:
    """A value on one line, and not too long."""
    text = json.dumps(value, default=str) if isinstance(value, (dict, list, bool, type(None))) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."
