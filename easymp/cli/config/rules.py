"""Configuration files of other libraries: how they are read, and how a table of rules turns them into settings.

A rule belongs to a key and says what its value means here. A text is said as it is; a function takes a setting and
returns the sentence to say; a mapping holds the rules of a section. Every key of a file gets its sentence.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Union

from ...base import env
from ...errors import SettingError, nearest
from ...registry import STRATEGIES
from ...settings import LAUNCHING, NAMES, checked

Rule = Callable[["Importer", Any], str]
Rules = Mapping[str, Union[Rule, str, "Rules"]]
OFF = "nothing to take: off"
AUTO = "nothing to take: auto, so the script says it"
CLIP = "in the script: accelerator.clip_grad_norm_(model.parameters(), {value}) before optimizer.step()"
WORDS_OFF = env.FALSE | {"none"}
MOST_VALUES, DEEPEST = 10_000, 100  # in a YAML file, whose aliases can make a few lines into billions


def each(keys: str, rule: Rule | str) -> dict[str, Rule | str]:
    """The same rule for several keys, which stand in one text."""
    return dict.fromkeys(keys.split(), rule)


def also_off(rule: Rule) -> Rule:
    """Mark a rule that is asked about values that mean "off", too."""
    rule.also_off = True  # type: ignore[attr-defined]
    return rule


def is_off(value: Any) -> bool:
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    return value == [] or value is None or str(value).lower() in WORDS_OFF


# -- reading


@dataclasses.dataclass(frozen=True)
class Document:
    """A file as keys and values."""

    name: str  # the path as it was given
    content: dict[str, Any]
    text: str  # for line numbers; of JSON without comments

    def where(self, path: tuple[str, ...]) -> str:
        """``"default_config.yaml, line 3"``."""
        at = 0
        for key in path:
            found = re.compile(rf"""(?<!\w)["']?{re.escape(key)}["']?\s*:""").search(self.text, at)
            if found is None:
                return self.name
            at = found.end()
        return f"{self.name}, line {self.text.count(chr(10), 0, at) + 1}"


def read_document(path: str | Path) -> Document:
    """The file at `path`: YAML by its ending, else JSON if it begins with a brace, comments aside, else YAML.

    Raises:
        SettingError: no such file, neither JSON nor YAML, a key stands twice, or PyYAML is missing.
    """
    name, place = str(path), Path(path)
    if not place.is_file():
        raise SettingError(
            f"{name!r} is no file: pass the path of a configuration of Accelerate (YAML) or of DeepSpeed (JSON)"
        )
    try:
        text = place.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{name!r} cannot be read as a text file: {error}") from error
    if not text.strip():
        raise SettingError(f"{name} is empty: pass a configuration of Accelerate (YAML) or DeepSpeed (JSON)")
    plain = without_comments(text)
    by_ending = {".yaml": True, ".yml": True, ".json": False}.get(place.suffix.lower())
    yaml = not plain.lstrip().startswith("{") if by_ending is None else by_ending
    content = _read_yaml(text, name) if yaml else read_json(text, name)
    if not isinstance(content, dict):
        raise SettingError(f"{name} holds a {type(content).__name__}, where keys with values were expected")
    return Document(name, content, text if yaml else plain)


STRING = r'("(?:[^"\\\n]|\\.)*")'
COMMENT = re.compile(STRING + r"|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
LAST_COMMA = re.compile(STRING + r"|(?<=[^\s,\[{:])(\s*),(?=\s*[}\]])")


def without_comments(text: str) -> str:
    """JSON without ``//``, ``#`` and ``/* */``, which become spaces, so that lines keep their numbers."""
    return COMMENT.sub(lambda m: m[1] or re.sub(r"[^\n]", " ", m[0]), text)


def read_json(text: str, name: str) -> Any:
    """The value of JSON with comments and trailing commas; errors call the text `name`.

    Raises:
        SettingError: it is not JSON, a key stands twice in one object, or a number is not finite.
    """
    plain = without_comments(text.removeprefix("\ufeff"))

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            keys = [key for key, _ in pairs]
            raise twice(next(key for key in keys if keys.count(key) > 1), plain, name)
        return found

    def finite(word: str) -> float:
        if not math.isfinite(float(word)):
            raise SettingError(f"{name}: {word} is not a finite number")
        return float(word)

    try:
        return json.loads(
            LAST_COMMA.sub(lambda m: m[1] or m[2] + " ", plain),
            object_pairs_hook=unique,
            parse_float=finite,
            parse_constant=finite,
        )
    except json.JSONDecodeError as error:
        line = plain.splitlines()[error.lineno - 1].strip() if plain.strip() else ""
        raise SettingError(f"{name}, line {error.lineno}: {error.msg}, in {line[:60]!r}") from error
    except SettingError:
        raise
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, and thousands of brackets
        raise SettingError(f"{name} cannot be read: {error}") from error


def twice(key: str, text: str, name: str) -> SettingError:
    found = re.finditer(rf"""(?<!\w)["']?{re.escape(key)}["']?\s*:""", text)
    lines = [str(text.count("\n", 0, match.start()) + 1) for match in found]
    where = f", line {lines[-1]}" if lines else ""
    return SettingError(f"{name}{where}: the key {key!r} stands twice (lines {', '.join(lines)}): keep one")


def _read_yaml(text: str, name: str) -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise SettingError(f"{name} is YAML, which PyYAML reads: pip install 'easymp[yaml]'") from error
    count = 0

    def check(node: Any, depth: int) -> None:
        nonlocal count
        count += 1
        if depth > DEEPEST or count > MOST_VALUES:
            raise SettingError(f"{name} holds more values than a configuration has, or nested without end")
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        keys = [key.value for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise twice(str(key), text, name)
        items = node.value if isinstance(node, yaml.SequenceNode) else [value for _, value in pairs]
        for value in items:
            check(value, depth + 1)

    try:
        node = yaml.compose(text, yaml.SafeLoader)
        if node is None:
            return {}
        check(node, 0)
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        raise SettingError(f"{name}{place} is not valid YAML: {getattr(error, 'problem', error)}") from error
    except SettingError:
        raise
    except ValueError as error:  # such as a date that does not exist
        raise SettingError(f"{name} is not valid YAML: {error}") from error


# -- rules


class Importer:
    """What was taken from files so far. A `strategy` of None is "auto", which has no options."""

    def __init__(self, document: Document, library: str, strategy: str | None) -> None:
        self.settings: dict[str, Any] = {}  # by name, checked
        self.launching: dict[str, Any] = {}  # those of `easymp launch`
        self.options: dict[str, Any] = {}  # of the strategy
        self.lines: list[tuple[str, str]] = []  # a key with its value, and what became of it
        self._scaling: dict[str, Any] = {}  # of GradScalerKwargs
        self.path: tuple[str, ...] = ()  # of the key at hand
        self.library = library
        self.begin(document, library, strategy)

    def begin(self, document: Document, library: str, strategy: str | None) -> None:
        """Go on with another file, which the one before named."""
        self.document, self._whose, self.strategy = document, library, strategy

    def walk(self, content: Mapping[str, Any], rules: Rules, path: tuple[str, ...] = ()) -> None:
        """Apply `rules` to each key of `content`, the section of the document at `path`."""
        idle = "enabled" in rules and content.get("enabled") is not True
        for key, value in content.items():
            key, self.path = str(key), (*path, str(key))
            rule = rules.get(key)
            if isinstance(rule, Mapping) and isinstance(value, Mapping) and value:
                self.walk(value, rule, self.path)
                continue
            if rule is not None and idle and key != "enabled":
                said = f"nothing to take: {path[-1]} is not enabled"
            else:
                said = self._apply(key, value, rules)
            self.lines.append((f"{'.'.join(self.path)}: {spelled(value)}", said))

    def _apply(self, key: str, value: Any, rules: Rules) -> str:
        rule = rules.get(key)
        if rule is None:
            section = f" in {'.'.join(self.path[:-1])}" if self.path[1:] else ""
            return f"unknown, nothing taken: {self._whose} has no {key!r}{section}{nearest(key, rules)}"
        if is_off(value) and not hasattr(rule, "also_off"):
            return OFF
        if isinstance(rule, str):
            return rule.replace("{value}", spelled(value))
        if value == "auto":
            return AUTO
        if isinstance(rule, Mapping):
            raise self.wrong(value, "is no group of keys")
        return rule(self, value)

    def set(self, name: str, value: Any) -> str:
        """Take a setting."""
        value = checked(NAMES[name], value, f"{self.where()}: {self.path[-1]} = ")
        if self.settings.setdefault(name, value) != value:
            raise SettingError(
                f"{self.where()}: {'.'.join(self.path)} would be {name} = {json.dumps(value)}, but another line of "
                f"the file says {json.dumps(self.settings[name])}: remove one of the two"
            )
        return f"{name} = {json.dumps(value)}"

    def launch(self, name: str, value: Any) -> str:
        """Take a setting of `easymp launch`."""
        self.launching[name] = checked(LAUNCHING[name], value, f"{self.where()}: {self.path[-1]} = ")
        return f"[launch] {name} = {json.dumps(self.launching[name])}"

    def option(self, **options: Any) -> str:
        """Take options of the strategy."""
        if self.strategy is None:
            return "nothing to take: strategy stays auto, which has no options"
        known = self.known_options
        for name in options:
            if name not in known:
                return f"no counterpart: strategy {self.strategy} has no option {name}"
        self.options.update(options)
        return "[strategy_options] " + ", ".join(f"{k} = {json.dumps(v)}" for k, v in options.items())

    @property
    def known_options(self) -> set[str]:
        fields = dataclasses.fields(STRATEGIES[self.strategy].Options) if self.strategy else ()
        return {f.name for f in fields}

    def scale(self, **options: Any) -> str:
        """Options of the loss scale, which the script passes."""
        self._scaling.update(options)
        return f"in the script: {_call('GradScalerKwargs', options)}"

    @property
    def script(self) -> str:
        """The call of `Accelerator` that the script has to make; empty where it needs no arguments."""
        handler = _call("GradScalerKwargs", self._scaling)
        return f"Accelerator(kwargs_handlers=[{handler}])" if self._scaling else ""

    def number(self, value: Any, least: float = 0, whole: bool = False) -> Any:
        """`value`, if it is such a number. YAML reads 1e8 as a text."""
        try:
            value = float(value) if isinstance(value, str) else value
        except ValueError:
            raise self.wrong(value, "is no number") from None
        if whole and isinstance(value, float) and value.is_integer():
            value = int(value)
        good = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not (good and least <= value < float("inf")):
            raise self.wrong(value, f"is no {'whole ' * whole}number of at least {least:g}")
        return value

    def yes(self, value: Any) -> bool:
        word = "" if value is None else str(value).lower()
        if word not in env.TRUE | env.FALSE:
            raise self.wrong(value, "is neither yes nor no")
        return word in env.TRUE

    def wrong(self, value: Any, why: str) -> SettingError:
        return SettingError(f"{self.where()}: {'.'.join(self.path)} = {spelled(value)} {why}")

    def where(self) -> str:
        return self.document.where(self.path)


def switch(name: str, on: Any = True) -> Rule:
    """A rule for yes or no: yes sets `name`."""
    return lambda take, value: take.set(name, on) if take.yes(value) else OFF


def switch_option(name: str, on: Any = True) -> Rule:
    """A rule for yes or no: yes sets an option of the strategy."""
    return lambda take, value: take.option(**{name: on}) if take.yes(value) else OFF


def by_value(special: Mapping[str, str], otherwise: str) -> Rule:
    """A rule that takes nothing: a sentence for some values, and one for all others."""
    return lambda take, value: special.get(str(value), otherwise).replace("{value}", spelled(value))


def clip(take: Importer, value: Any) -> str:
    return CLIP.format(value=take.number(value))


@also_off
def accumulate(take: Importer, value: Any) -> str:
    return AUTO if value == "auto" else take.set("gradient_accumulation_steps", value)


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def spelled(value: Any) -> str:
    """A value on one line, and not too long."""
    text = json.dumps(value, default=str) if isinstance(value, (dict, list, bool, type(None))) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."
