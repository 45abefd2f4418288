"""The project file: composed anew, or edited so that comments and other keys stay; replaced at once, with a backup."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from ...base.units import read_bytes, size
from ...errors import SettingError
from ...settings import LAUNCH, LAUNCHING, NAMES
from ..terminal import require_packages
from .foreign import FIELDS, SENTENCES

WIDTH = 78
REMOVED = "easymp: to be removed"  # the value of a setting before its line becomes a comment
REASON = "# here: "  # begins a comment of ours, which goes with its value
EXAMPLES = SENTENCES["examples"]
HEAD = """\
# The settings of this project's runs; arguments in a script and variables that
# begin with EASYMP_ win over them. Written by `easymp config`, and yours to edit.
"""
Keys = tuple[str, ...]  # ("seed",), ("launch", "processes"), ("strategy_options", "wrap")


def literal(value: Any) -> str:
    """`value` as TOML writes it."""
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_key(k)} = {literal(v)}" for k, v in value.items())
        return f"{{ {pairs} }}" if value else "{}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else json.dumps(name)


def _with_unit(name: str, value: Any) -> Any:
    """The value of a setting as it is written: a size in words, where these are exact."""
    if name not in FIELDS or not str(FIELDS[name].type).startswith("Size") or not isinstance(value, int):
        return value
    text = size(value).replace(".0 ", "")
    return text if read_bytes(text, "") == value else value


def setting_line(name: str, value: Any, reason: str = "") -> str:
    return f"{_key(name)} = {literal(_with_unit(name, value))}{_comment(reason)}"


def _comment(reason: str) -> str:
    return f"  {REASON}{' '.join(reason.split())}" if reason else ""


def unset_line(name: str) -> str:
    """A comment that shows a setting's default, or an example where it has none."""
    default = FIELDS[name].default
    note = "  # an example" if default is None else ""
    return f"# {setting_line(name, EXAMPLES[name] if default is None else default)}{note}"


def setting_lines(values: Mapping[str, Any]) -> list[str]:
    """The lines that set `values`, those of tables with dotted keys."""
    flat = {".".join(keys): value for keys, value in _flatten(values).items() if value is not None}
    return [f"{keys} = {literal(flat[keys])}" for keys in sorted(flat, key=lambda keys: "." in keys)]


def compose(values: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """A whole file: `values` that are not None are set, and the other settings are comments with their defaults."""

    def section(fields: Mapping[str, Any]) -> str:
        blocks = []
        for name in sorted(fields, key=lambda name: values.get(name) is None):  # stable
            help, value = str(fields[name].metadata["help"]), values.get(name)
            comment = textwrap.wrap(f"{help[0].upper()}{help[1:]}", WIDTH - 2, break_on_hyphens=False)
            setting = unset_line(name) if value is None else setting_line(name, value, reasons.get(name, ""))
            blocks.append("\n".join([*(f"# {line}" for line in comment), setting]))
        return "\n\n".join(blocks)

    tables = {name: value for name, value in values.items() if isinstance(value, Mapping)}
    text = f"{HEAD}\n{section({name: FIELDS[name] for name in NAMES if name in FIELDS and name not in tables})}\n"
    for name, options in tables.items():
        text += "".join([f"\n[{name}]\n", *(f"{setting_line(key, value)}\n" for key, value in options.items())])
    return f"{text}\n[{LAUNCH}]\n{section(LAUNCHING)}\n"


def edit(text: str, present: Mapping[str, Any], values: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """`text`, whose settings are `present`, with these values; None comments a setting out.

    Comments and all other keys stay.
    """
    changes = {name: value for name, value in values.items() if present.get(name) != value}
    if not changes:
        return text
    require_packages("cli", "tomlkit")
    old, new = _flatten(tomllib.loads(text)), _flatten(changes)
    removed = dict.fromkeys(keys for keys in old if keys[0] in changes and keys not in new)
    goal = {keys: value for keys, value in {**old, **removed, **new}.items() if value is not None}
    edited = text.replace("\r\n", "\n").rstrip("\n") + "\n"
    with contextlib.suppress(ValueError, KeyError, TypeError):  # tomlkit's errors are of these types
        for keys, value in {**removed, **new}.items():
            if old.get(keys) != value:
                edited = _put(edited, keys, value, reasons.get(keys[-1], ""))
        if _flatten(tomllib.loads(edited)) == goal:
            return edited.replace("\n", "\r\n") if "\r\n" in text else edited
    lines = [f"without {name}" if value is None else setting_line(name, value) for name, value in changes.items()]
    by_hand = "; ".join(lines)
    raise SettingError(f"the file is written in a way that cannot be edited from here; by hand, write {by_hand}")


def _flatten(values: Mapping[str, Any]) -> dict[Keys, Any]:
    """Each value as it is written, by its keys."""
    flat: dict[Keys, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= {(name, key): list(v) if isinstance(v, tuple) else v for key, v in value.items()}
        else:
            flat[(LAUNCH, name) if name in LAUNCHING else (name,)] = _with_unit(name, value)
    return flat


def _put(text: str, keys: Keys, value: Any, reason: str) -> str:
    """`text` with a value in place of the present one, of the comment that shows its default, or on a line of its own.

    None removes it.
    """
    import tomlkit

    name, document = keys[-1], tomlkit.parse(text)
    unset = unset_line(name) if name in FIELDS else ""
    if value is not None and keys not in _flatten(document.unwrap()):
        line = setting_line(name, value, reason)
        candidates = [re.sub(rf"(?m)^{re.escape(unset)}$", lambda _: line, text, count=1)] if unset else []
        header = re.search(r"(?m)^([ \t]*#.*\n)*[ \t]*\[", text)  # of the first table, with the comments above it
        if header is not None and not keys[1:] and name not in document:
            candidates.append(f"{text[: header.start()]}{line}\n\n{text[header.start() :]}")
        for candidate in candidates:
            if _adds(candidate, text, keys):
                return candidate
    table: Any = document.setdefault(keys[0], tomlkit.table()) if keys[1:] else document
    is_inline = isinstance(table, tomlkit.items.InlineTable)
    if value is None and (is_inline or not unset):
        del table[name]
        if not table and not is_inline:
            del document[keys[0]]
        return tomlkit.dumps(document)
    item, present = tomlkit.item(REMOVED if value is None else value), table.get(name)
    comment = present.trivia.comment if hasattr(present, "trivia") else ""
    if reason and (not comment or comment.startswith(REASON)):
        item.trivia.comment_ws, item.trivia.comment = "  ", _comment(reason).strip()
    table[name] = item  # which keeps the comment of the present one
    edited = tomlkit.dumps(document)
    return edited if value is not None else re.sub(rf'(?m)^.*"{REMOVED}"( *{REASON}.*)?', lambda _: unset, edited)


def _adds(edited: str, text: str, keys: Keys) -> bool:
    """Whether `edited` has the values of `text`, and one of `keys`: its line may be in another table, or in a text."""
    try:
        values = _flatten(tomllib.loads(edited))
    except tomllib.TOMLDecodeError:
        return False
    return values.pop(keys, None) is not None and values == _flatten(tomllib.loads(text))


class Target(NamedTuple):
    """The path of the file, and its bytes before the command; None where there is no file."""

    path: Path
    content: bytes | None


def open_target(path: Path, writable: bool = True) -> Target:
    """Read `path`, and with `writable` make sure that it can be written."""
    with _writing(path):
        folder = path.resolve().parent
        if not folder.is_dir():
            raise SettingError(f"there is no folder {folder} for {path}: make it first, or pass --file")
        if path.exists() and not path.is_file():
            raise SettingError(f"{path} is not an ordinary file: name a file by --file, such as easymp.toml")
        if writable:
            with tempfile.TemporaryFile(dir=folder, prefix=".easymp-"):
                pass
        return Target(path, path.read_bytes() if path.exists() else None)


def write(target: Target, text: str) -> Path | None:
    """Replace the file at once, so that a reader finds the old one or the new one; returns the path of the backup."""
    path, backup = target.path.resolve(), None
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    with _writing(target.path):
        try:
            temporary.write_bytes(text.encode())
            if path.exists():
                shutil.copymode(path, temporary)
                names = (path.with_name(f"{path.name}.bak{f'.{n}' if n else ''}") for n in count())
                backup = next(name for name in names if not name.exists())
                shutil.copy2(path, backup)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return backup


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn the system's errors into SettingError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise SettingError(f"{path} cannot be written: {reason}; name another file by --file") from error
