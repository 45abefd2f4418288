"""Rules that turn the keys of other libraries' configuration files into settings.

A rule tells the meaning of a key's value here. A text is the sentence to print (sentences.toml has most of them); a
function takes settings and returns the sentence; a mapping holds the rules of a section. Every key of a file gets its
sentence.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, Union

from ...base import env
from ...errors import SettingError, nearest
from ...registry import STRATEGIES
from ...settings import LAUNCHING, NAMES, as_table, checked
from .documents import Document

Rule = Callable[["ImportedSettings", Any], str]
Rules = Mapping[str, Union[Rule, str, "Rules"]]
OFF = "nothing to take: off"
# What a file can hold: a function comes from Python only.
FIELDS = {name: f for name, f in {**NAMES, **LAUNCHING}.items() if not str(f.type).startswith("Function")}
SENTENCES = tomllib.loads(Path(__file__).with_name("sentences.toml").read_text(encoding="utf-8"))

# -- DeepSpeed's keys, for `easymp.compat.deepspeed`, too


class Key(NamedTuple):
    """A key of DeepSpeed's configuration."""

    default: Any  # DeepSpeed's; a list holds all values that ask for nothing
    kind: str  # "honoured", "ignored" or "refused" in scripts of DeepSpeed
    reason: str  # why it is ignored or refused; of an honoured key, what to write for easymp

    def asks(self, value: Any) -> bool:
        """Whether `value` asks for something: it is neither null, "auto", a default, nor a section that is off."""
        if value in (None, "auto", {}, []) or (isinstance(value, Mapping) and value.get("enabled") in (False, "auto")):
            return False
        defaults = self.default if isinstance(self.default, list) else [self.default]
        return (value.lower() if isinstance(value, str) else value) not in defaults


def _read_keys() -> dict[str, dict[str, Key]]:
    tables = tomllib.loads(Path(__file__).with_name("deepspeed_keys.toml").read_text(encoding="utf-8"))
    sections: dict[str, dict[str, Key]] = {}
    for names, reasons_by_kind in tables.items():
        for kind, reasons in reasons_by_kind.items():
            for reason, text in reasons.items():
                for name, equals, default in (entry.partition("=") for entry in text.split()):
                    key = Key(json.loads(default) if equals else None, kind, reason)
                    spellings = [name] if name[0] != "?" else [name[1:], f"stage3_{name[1:]}"]
                    for section in names.split() or [""]:
                        sections.setdefault(section, {}).update(dict.fromkeys(spellings, key))
    return sections


KEYS = _read_keys()  # section → key → what it does


class ImportedSettings:
    """The settings taken from files so far. A `strategy` of None is "auto", which has no options."""

    def __init__(self, document: Document, library: str, strategy: str | None) -> None:
        self.values: dict[str, Any] = {}  # of settings by name, those of `easymp launch` too
        self.lines: list[tuple[str, str]] = []  # a key with its value, and the sentence about it
        self.path: tuple[str, ...] = ()  # of the current key
        self.library = library
        self.begin(document, library, strategy)

    def begin(self, document: Document, library: str, strategy: str | None) -> None:
        """Go on with another file, which the previous one named."""
        self.document, self._format, self.strategy = document, library, strategy

    def walk(self, content: Mapping[str, Any], rules: Rules, path: tuple[str, ...] = ()) -> None:
        """Apply `rules` to each key of `content`, the section of the document at `path`."""
        disabled = "enabled" in rules and content.get("enabled") is not True
        for key, value in content.items():
            self.path = (*path, str(key))
            rule = rules.get(str(key))
            if isinstance(rule, Mapping) and isinstance(value, Mapping) and value:
                self.walk(value, rule, self.path)
                continue
            if rule is None:
                section = f" in {'.'.join(path)}" if path else ""
                hint = nearest(str(key), rules)
                sentence = f"unknown, nothing taken: {self._format} has no {str(key)!r}{section}{hint}"
            elif disabled and key != "enabled":
                sentence = f"nothing to take: {path[-1]} is not enabled"
            else:
                sentence = self._apply(rule, value)
            self.lines.append((f"{'.'.join((*path, str(key)))}: {spelled(value)}", sentence))

    def _apply(self, rule: Rule | str | Rules, value: Any) -> str:
        if is_off(value) and not hasattr(rule, "also_off"):
            return OFF
        if value == "auto":
            return "nothing to take: auto, so the script decides it"
        if isinstance(rule, str):
            return rule.replace("{value}", spelled(value))
        if isinstance(rule, Mapping):
            raise self.wrong(value, "is not a group of keys")
        return rule(self, value)

    def set(self, name: str, value: Any) -> str:
        value = checked(FIELDS[name], value, f"{self.document.name}: {self.address} = ")
        if self.values.setdefault(name, value) != value:
            raise SettingError(
                f"{self.document.name}: {self.address} would be {name} = {json.dumps(value)}, but another line has "
                f"{json.dumps(self.values[name])}: remove one of the two"
            )
        return f"{'[launch] ' * (name in LAUNCHING)}{name} = {json.dumps(value)}"

    def option(self, **options: Any) -> str:
        if self.strategy is None:
            return "nothing to take: strategy stays auto, which has no options"
        if unknown := options.keys() - self.strategy_options:
            return f"no counterpart: strategy {self.strategy} has no option {min(unknown)}"
        return self.table("strategy_options", **options)

    @property
    def strategy_options(self) -> frozenset[str]:
        return frozenset(f.name for f in fields(STRATEGIES[self.strategy].Options)) if self.strategy else frozenset()

    def table(self, name: str, **options: Any) -> str:
        record = {**as_table(self.values.get(name)), **options}
        self.values[name] = record["what"] if record.keys() == {"what"} else record  # `compile` is one word then
        return f"[{name}] " + ", ".join(f"{k} = {json.dumps(v)}" for k, v in options.items())

    def number(self, value: Any, lowest: float = 0, highest: float = math.inf, integer: bool = False) -> Any:
        """`value`, if it is such a number. YAML reads 1e8 as a text."""
        try:
            value = float(value) if isinstance(value, str) else value
        except ValueError:
            raise self.wrong(value, "is not a number") from None
        if integer and isinstance(value, float) and value.is_integer():
            value = int(value)
        is_number = isinstance(value, int if integer else (int, float)) and not isinstance(value, bool)
        if not (is_number and lowest <= value <= highest and value < math.inf):
            bounds = f"of at least {lowest:g}" if highest == math.inf else f"from {lowest:g} to {highest:g}"
            raise self.wrong(value, f"is not {'an integer' if integer else 'a number'} {bounds}")
        return value

    def boolean(self, value: Any) -> bool:
        if str(value).lower() not in env.TRUE | env.FALSE:
            raise self.wrong(value, "is neither yes nor no")
        return str(value).lower() in env.TRUE

    def wrong(self, value: Any, problem: str) -> SettingError:
        return SettingError(f"{self.document.name}: {self.address} = {spelled(value)} {problem}")

    @property
    def address(self) -> str:
        """The current key with its sections: ``"zero_optimization.stage"``."""
        return ".".join(self.path)


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
    return lambda settings, value: settings.set(name, on) if settings.boolean(value) else OFF


@also_off
def accumulate(settings: ImportedSettings, value: Any) -> str:
    return settings.set("gradient_accumulation_steps", value)


def spelled(value: Any) -> str:
    """A value on one line of at most 60 characters."""
    text = json.dumps(value, default=str) if isinstance(value, (dict, list, bool, type(None))) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."
