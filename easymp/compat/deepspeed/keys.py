"""DeepSpeed 0.19's names, from ``names.toml``: keys of its configuration with their defaults, and refused names with the reasons."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

NAMES = tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))


class Key(NamedTuple):
    """A key of the configuration.

    Attributes:
        default: DeepSpeed's; a list holds all values that ask for nothing.
        why: the reason for which other values are ignored or refused; "" where they are honoured.
        refused: other values are an error.
    """

    default: Any
    why: str = ""
    refused: bool = False

    def asks(self, value: Any) -> bool:
        """Whether `value` asks for something: it is neither null, "auto", a default, nor a section that is off."""
        if value in (None, "auto", {}, []) or (
            isinstance(value, Mapping) and value.get("enabled") in (False, "auto")
        ):
            return False
        known = self.default if isinstance(self.default, list) else [self.default]
        return (value.lower() if isinstance(value, str) else value) not in known


def _keys(table: Mapping[str, Any], why: str = "", refused: bool = False) -> dict[str, Key]:
    own = {name: value for name, value in table.items() if name != "null" and not isinstance(value, dict)}
    found = {name: Key(value, why, refused) for name, value in own.items()}
    found |= {name: Key(None, why, refused) for name in table.get("null", "").split()}
    for kind in ("ignored", "refused"):
        for reason, inner in table.get(kind, {}).items():
            found |= _keys(inner, reason, kind == "refused")
    return found


KEYS = {section: _keys(table) for section, table in NAMES["keys"].items()}
# Address of a module → its absent names, with the reasons; and addresses of modules that are refused.
ABSENT: dict[str, dict[str, str]] = NAMES["absent"]
ABSENT |= dict.fromkeys(("runtime.zero", "runtime.zero.partition_parameters"), ABSENT["zero"])
ADDRESSES = {at: why for why, addresses in NAMES["addresses"].items() for at in addresses.split()}
REFUSED: dict[str, str] = NAMES["engine"]["refused"]
# Method of the engine → the section and the key that it answers with.
ANSWERS: dict[str, tuple[str, str]] = {
    **{f"zero_{key}": ("zero_optimization", key) for key in KEYS["zero_optimization"]},
    **{f"flops_profiler_{key}": ("flops_profiler", key) for key in KEYS["flops_profiler"]},
}
for _name, _keyed in NAMES["engine"]["answers"].items():
    _section, _dot, _key = _keyed.rpartition(".")
    ANSWERS |= {_name: (_section, _key)} if _dot else {key: (_name, key) for key in _keyed.split()}
ANSWERED_FALSE = frozenset(NAMES["engine"]["off"]["names"].split())
