"""How a file of another library becomes settings: rules by key, and a sentence for every line.

A rule says what a value means here. It may put it among the settings, the flags of `easymp launch`, or the arguments that the script has
to pass; what it returns is the sentence. A key without a rule is named, with its nearest.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, Union

from ...base import env
from ...errors import SettingError, nearest
from ...settings import LAUNCHING, NAMES, checked
from ...strategies import STRATEGIES
from .document import Document

Rule = Callable[["Taking", Any], str]
Rules = Mapping[str, Union[Rule, str, "Rules"]]  # a text stands for a rule that takes nothing and says it
CLIP = "in the script: accelerator.clip_grad_norm_(model.parameters(), {value}) before optimizer.step()"
OFF = (None, False, "", "no", "NO", "none", "None", "false", "False", {}, [])


class Taking:
    """What has been taken from a document so far.

    Args:
        what: whose keys they are, in words.
        spread: the strategy that the whole document asks for; None leaves it to "auto", which takes no options.

    Attributes:
        settings, launching: of `Settings` and `Launching`, by name, checked.
        arguments: what the script has to pass to `Accelerator`, for these are no settings.
        scaling: of `GradScalerKwargs`, which the script has to pass.
        lines: (what stands in the file, what became of it), in its order.
    """

    def __init__(self, document: Document, what: str, spread: str | None) -> None:
        self.document, self._what, self.spread = document, what, spread
        self.options = (
            [f.name for f in dataclasses.fields(STRATEGIES[spread].Options)] if spread else []
        )  # that there are
        self.settings: dict[str, Any] = {}
        self.launching: dict[str, Any] = {}
        self.arguments: dict[str, Any] = {}
        self.scaling: dict[str, Any] = {}
        self.lines: list[tuple[str, str]] = []
        self.path: tuple[str, ...] = ()

    def inside(self, document: Document, what: str, spread: str | None) -> Taking:
        """For a file that this one names: what is taken from it is taken together."""
        other = Taking(document, what, spread)
        other.settings, other.launching, other.lines = self.settings, self.launching, self.lines
        other.arguments, other.scaling = self.arguments, self.scaling
        return other

    def walk(self, content: Mapping[str, Any], rules: Rules, path: tuple[str, ...] = ()) -> None:
        """Apply `rules` to each key of `content`, which lies at `path` of the document."""
        for key, value in content.items():
            here, rule = (*path, str(key)), rules.get(str(key))
            self.path = here
            if isinstance(rule, Mapping) and isinstance(value, Mapping) and value:
                self.walk(value, rule, here)
                continue
            if rule is None:
                inside = f" in {'.'.join(path)}" if path else ""
                said = f"unknown, nothing taken: {self._what} has no {str(key)!r}{inside}{nearest(str(key), rules)}"
            elif isinstance(rule, Mapping):
                if value not in OFF:
                    raise self.wrong(value, "is no group of keys")
                said = "nothing to take: empty"
            else:
                said = rule if isinstance(rule, str) else rule(self, value)
            self.lines.append((f"{'.'.join(here)}: {spelled(value)}", said))

    def set(self, name: str, value: Any) -> str:
        """Take a setting."""
        value = checked(NAMES[name], value, f"{self.where()}: {self.path[-1]} = ")
        if self.settings.setdefault(name, value) != value:
            raise SettingError(
                f"{self.where()}: {'.'.join(self.path)} would be {name} = {json.dumps(value)}, but another line of the file says "
                f"{json.dumps(self.settings[name])}: remove one of the two"
            )
        return f"{name} = {json.dumps(value)}"

    def launch(self, name: str, value: Any) -> str:
        """Take a setting of `easymp launch`."""
        self.launching[name] = checked(LAUNCHING[name], value, f"{self.where()}: {self.path[-1]} = ")
        return f"[launch] {name} = {json.dumps(self.launching[name])}"

    def option(self, **options: Any) -> str:
        """Options of the strategy, which the script passes."""
        if self.spread is None:
            return "nothing to take: strategy stays auto, which has no options"
        for name in options:
            if name not in self.options:
                return f"no counterpart: strategy {self.spread} has no option {name}"
        self.arguments["strategy_options"] = {**self.arguments.get("strategy_options", {}), **options}
        return f"in the script: {_called('Accelerator', {'strategy_options': options})}"

    def argument(self, **arguments: Any) -> str:
        """Arguments of `Accelerator` that are no settings."""
        self.arguments.update(arguments)
        return f"in the script: {_called('Accelerator', arguments)}"

    def scale(self, **options: Any) -> str:
        """Options of the loss scale."""
        self.scaling.update(options)
        return f"in the script: {_called('GradScalerKwargs', options)}"

    def script(self) -> str:
        """The call of `Accelerator` with all that the script has to say; empty where that is nothing."""
        handlers = f"kwargs_handlers=[{_called('GradScalerKwargs', self.scaling)}]" if self.scaling else ""
        named = _called("Accelerator", self.arguments)[:-1]
        if not handlers:
            return f"{named})" if self.arguments else ""
        return f"{named}{', ' if self.arguments else ''}{handlers})"

    def number(self, value: Any, least: float = 0, whole: bool = False) -> Any:
        """`value`, if it is such a number; YAML leaves 1e8 a text."""
        try:
            value = float(value) if isinstance(value, str) else value
        except ValueError:
            raise self.wrong(value, "is no number") from None
        if whole and isinstance(value, float) and value.is_integer():
            value = int(value)
        good = (
            isinstance(value, int if whole else (int, float))
            and not isinstance(value, bool)
            and least <= value < float("inf")
        )
        if not good:
            raise self.wrong(value, f"is no {'whole ' * whole}number of at least {least:g}")
        return value

    def yes(self, value: Any) -> bool:
        """`value` as yes or no, in the words that such files have."""
        word = "" if value is None else str(value).lower()
        if word not in env.TRUE | env.FALSE:
            raise self.wrong(value, "is neither yes nor no")
        return word in env.TRUE

    def wrong(self, value: Any, why: str) -> SettingError:
        return SettingError(f"{self.where()}: {'.'.join(self.path)} = {spelled(value)} {why}")

    def where(self) -> str:
        return self.document.where(*self.path)


def _called(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def when_on(text: str) -> Rule:
    """A rule that takes nothing: `text` where the value, or what is ``enabled`` in it, turns something on."""

    def rule(take: Taking, value: Any) -> str:
        off = value in OFF or (isinstance(value, Mapping) and value.get("enabled") is False)
        return "nothing to take: off" if off else text.replace("{value}", spelled(value))

    return rule


def spelled(value: Any) -> str:
    """A value on one line, and not too long."""
    text = json.dumps(value, default=str) if isinstance(value, (dict, list, bool, type(None))) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."
