"""Settings as lines of TOML, each under a comment: what it is, and why it has this value here."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping
from typing import Any

from ...base.units import UNITS
from ...settings import LAUNCH, LAUNCHING, NAMES
from .case import KNOWN

WIDTH = 78
HERE = "# Here: "  # begins a comment that the wizard may replace with its value; it goes on in lines that begin with MORE
MORE = "#   "
HEAD = """\
# What this project asks of its runs; arguments in a script and variables that
# begin with EASYMP_ win over it. Written by `easymp config`, and yours to edit.
"""
# Of settings that have no default value, one that shows how they are written.
EXAMPLES: Mapping[str, Any] = {
    "debug": False,
    "activation_checkpointing": "blocks",
    "ema_decay": 0.999,
    "seed": 0,
    "memory": 16 << 30,
    "project_dir": "runs",
    "processes": 1,
    "nodes": "2",
    "main_address": "node0",
    "main_port": 29500,
    "nonfinite": "warn",
    "log_with": "jsonl",
}
ESCAPES = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def literal(f: dataclasses.Field[Any], value: Any) -> str:
    """`value` of the setting `f` as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return _size(value) if str(f.type).startswith("Size") else repr(value)
    return '"' + "".join(_character(c) for c in value) + '"'


def _size(number: float) -> str:
    """Bytes in the largest unit that holds them exactly."""
    for unit, count in (
        ("TiB", UNITS["tib"]),
        ("GiB", UNITS["gib"]),
        ("GB", UNITS["gb"]),
        ("MiB", UNITS["mib"]),
    ):
        if number % count == 0:
            return f'"{int(number // count)}{unit}"'
    return repr(number)


def _character(c: str) -> str:
    if c in ESCAPES:
        return ESCAPES[c]
    return f"\\u{ord(c):04x}" if ord(c) < 0x20 or c == "\x7f" else c


def block(name: str, value: Any, why: str = "") -> list[str]:
    """The lines of a setting; with None the last one is commented out, and shows the default or an example."""
    f = KNOWN[name]
    lines = _comment(f"{f.metadata['help'][0].upper()}{f.metadata['help'][1:]}")
    return [*lines, *here(why), f"{name} = {literal(f, value)}" if value is not None else unset(name)]


def here(why: str) -> list[str]:
    """The comment that says why a value was taken."""
    if not why:
        return []
    first, *rest = textwrap.wrap(why, WIDTH - len(HERE), break_long_words=False, break_on_hyphens=False)
    return [HERE + first, *(MORE + line for line in rest)]


def unset(name: str) -> str:
    """A line that shows a setting's default, or an example where it has none."""
    f = KNOWN[name]
    if f.default is not None:
        return f"# {name} = {literal(f, f.default)}"
    number = not str(f.type).startswith("str")
    usual = (
        f.metadata["choices"][-1] if f.metadata["choices"] else f.metadata["least"] or 1 if number else "..."
    )
    return f"# {name} = {literal(f, EXAMPLES.get(name, usual))}  # an example"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent="# ",
        subsequent_indent="# ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def compose(values: Mapping[str, Any], whys: Mapping[str, str]) -> str:
    """A whole file: what is in `values` set, and the rest shown with its defaults, commented out.

    Args:
        values: None leaves a setting out.
        whys: of some values, why.
    """

    def blocks(names: Mapping[str, Any]) -> str:
        chosen = [name for name in names if name in whys or values.get(name) is not None]
        said = ["\n".join(block(name, values.get(name), whys.get(name, ""))) for name in chosen]
        return "\n\n".join([*said, *("\n".join(block(name, None)) for name in names if name not in chosen)])

    return f"{HEAD}\n{blocks(NAMES)}\n\n[{LAUNCH}]\n{blocks(LAUNCHING)}\n"
