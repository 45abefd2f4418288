"""The project file: composed anew, or edited so that comments and other keys stay; replaced at once, with a copy kept."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import tempfile
import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from ...base.units import UNITS
from ...errors import SettingError
from ...settings import LAUNCH, LAUNCHING, NAMES, OPTIONS, checked
from ..terminal import library

KNOWN = {**NAMES, **LAUNCHING}
WIDTH = 78
WHY = "# here: "  # begins a comment of ours, which goes with its value
HEAD = """\
# What this project asks of its runs; arguments in a script and variables that
# begin with EASYMP_ win over it. Written by `easymp config`, and yours to edit.
"""
# Examples of settings that have no default.
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


# -- text


def literal(value: Any) -> str:
    """`value` as TOML writes it."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(str(k))} = {literal(v)}" for k, v in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)


def _plain(name: str, value: Any) -> Any:
    """The value of a setting as it is written: sizes in the largest unit that holds them exactly."""
    if not str(KNOWN[name].type).startswith("Size"):
        return value
    units = [unit for unit in ("TiB", "GiB", "GB", "MiB") if value % UNITS[unit.lower()] == 0]
    return f"{int(value // UNITS[units[0].lower()])}{units[0]}" if units else value


def line(name: str, value: Any, why: str = "") -> str:
    """A setting with its value, and why it has it here."""
    return f"{name} = {literal(_plain(name, value))}" + (f"  {WHY}{' '.join(why.split())}" if why else "")


def unset(name: str) -> str:
    """A comment that shows a setting's default, or an example where it has none."""
    f = KNOWN[name]
    if f.default is not None:
        return f"# {line(name, f.default)}"
    number = not str(f.type).startswith("str")
    usual = (
        f.metadata["choices"][-1] if f.metadata["choices"] else f.metadata["least"] or 1 if number else "..."
    )
    return f"# {line(name, EXAMPLES.get(name, usual))}  # an example"


def compose(values: Mapping[str, Any], whys: Mapping[str, str], options: Mapping[str, Any]) -> str:
    """A whole file: `values` that are not None are set; the other settings are shown commented out, with their defaults."""

    def blocks(fields: Mapping[str, dataclasses.Field[Any]]) -> str:
        chosen = sorted(fields, key=lambda name: values.get(name) is None)  # stable
        said = []
        for name in chosen:
            help = str(fields[name].metadata["help"])
            comment = textwrap.wrap(f"{help[0].upper()}{help[1:]}", WIDTH - 2, break_on_hyphens=False)
            value = values.get(name)
            last = unset(name) if value is None else line(name, value, whys.get(name, ""))
            said.append("\n".join([*(f"# {words}" for words in comment), last]))
        return "\n\n".join(said)

    table = "\n".join(f"{name} = {literal(value)}" for name, value in options.items())
    table = f"\n[{OPTIONS}]\n{table}\n" if table else ""
    return f"{HEAD}\n{blocks(NAMES)}\n{table}\n[{LAUNCH}]\n{blocks(LAUNCHING)}\n"


# -- editing

REMOVED = "easymp: to be removed"


def edit(
    text: str, values: Mapping[str, Any], whys: Mapping[str, str], options: Mapping[str, Any] | None = None
) -> str:
    """`text` with these values; None comments a setting out. Comments and all other keys stay.

    Raises:
        SettingError: tomlkit is missing, or the file is written in a way that it cannot edit.
    """
    wanted = tomllib.loads(text)
    changed = {name: value for name, value in values.items() if not _says(wanted, name, value)}
    options = {name: list(v) if isinstance(v, tuple) else v for name, v in (options or {}).items()}
    there = wanted.get(OPTIONS, {}) if options and _says(wanted, "strategy", values.get("strategy")) else {}
    options = options if {**there, **options} != wanted.get(OPTIONS, {}) else {}
    if not changed and not options:
        return text
    tomlkit = library("tomlkit", "to edit an existing file")
    for name, value in changed.items():
        table = wanted.setdefault(LAUNCH, {}) if name in LAUNCHING else wanted
        table[name] = None if value is None else _plain(name, value)
    if options:
        wanted[OPTIONS] = {**there, **options}
    edited = text.replace("\r\n", "\n")
    edited += "\n" * (not edited.endswith("\n") and bool(edited))
    for name, value in changed.items():
        edited = _uncomment(edited, name, value, whys.get(name, "")) if value is not None else edited
    try:
        document = tomlkit.parse(edited)
        for name, value in changed.items():
            _put(tomlkit, document, name, value, whys.get(name, ""))
        if options and there:
            document[OPTIONS].update(options)
        elif options:
            document[OPTIONS] = tomlkit.item(options)
        edited = tomlkit.dumps(document)
        edited = re.sub(rf'(?m)^.*\b(\w+)["\']?\s*=\s*"{REMOVED}"[ \t]*(.*)$', _commented_out, edited)
        good = _without_none(tomllib.loads(edited)) == _without_none(wanted)
    except (ValueError, KeyError, TypeError):
        good = False
    if not good:
        said = [line(name, value) for name, value in changed.items() if value is not None]
        said += [f"without {name}" for name, value in changed.items() if value is None]
        raise SettingError(
            f"the file is written in a way that cannot be edited from here; by hand, write {'; '.join(said)}"
        )
    return edited.replace("\n", "\r\n") if "\r\n" in text else edited


def _says(content: Mapping[str, Any], name: str, value: Any) -> bool:
    written = (content.get(LAUNCH, {}) if name in LAUNCHING else content).get(name)
    if written is None or value is None:
        return written is value
    return bool(checked(KNOWN[name], written, "") == value)


def _without_none(content: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in content.get(LAUNCH, {}).items() if value is not None}
    return {**{name: value for name, value in content.items() if value is not None}, LAUNCH: own}


def _commented_out(found: re.Match[str]) -> str:
    name, comment = found.groups()
    return unset(name) + (f"  {comment}" if comment and not comment.startswith(WHY) else "")


def _uncomment(text: str, name: str, value: Any, why: str) -> str:
    """Set a setting in place of the comment that shows its default, if there is one in its table."""
    header = re.search(rf"(?m)^\s*\[\s*{LAUNCH}\s*\]" if name in LAUNCHING else r"(?m)^\s*\[", text)
    split = header.start() if header else len(text)
    before, region = (text[:split], text[split:]) if name in LAUNCHING else ("", text[:split])
    after = "" if name in LAUNCHING else text[split:]
    new, found = re.subn(
        rf"(?m)^{re.escape(unset(name))}$", lambda m: line(name, value, why), region, count=1
    )
    return before + new + after if found else text


def _put(tomlkit: Any, document: Any, name: str, value: Any, why: str) -> None:
    if name in LAUNCHING and LAUNCH not in document:
        document[LAUNCH] = tomlkit.table()
    table = document[LAUNCH] if name in LAUNCHING else document
    inline = isinstance(table, tomlkit.items.InlineTable)
    old = table.get(name)
    if value is None and inline:
        table.pop(name, None)
    elif value is None or old is None or tomlkit.item(old).unwrap() != _plain(name, value):
        item = tomlkit.item(REMOVED if value is None else _plain(name, value))
        comment = old.trivia.comment if hasattr(old, "trivia") else ""
        if why and not inline and (old is None or comment.startswith(WHY)):
            item.comment(f"{WHY}{' '.join(why.split())}".removeprefix("# "))
            item.trivia.comment_ws = "  "
        table[name] = item


# -- the disk


@dataclass(frozen=True)
class Target:
    """Where the file goes, and the bytes that are there; None for no file."""

    path: Path
    before: bytes | None


def target(path: Path, writable: bool = True) -> Target:
    """Look at `path`, and with `writable` make sure that it can be written.

    Raises:
        SettingError: it cannot be read or written.
    """
    try:
        folder = path.resolve().parent
        if not folder.is_dir():
            raise SettingError(
                f"there is no folder {folder} for {path}: make it first, or name another file by --file"
            )
        if path.is_dir():
            raise SettingError(f"{path} is a folder: name a file by --file, such as {path / 'easymp.toml'}")
        if path.exists() and not path.is_file():
            raise SettingError(
                f"{path} is no ordinary file, and would be replaced by one: name another by --file"
            )
        before = path.read_bytes() if path.exists() else None
        if writable:
            with tempfile.TemporaryFile(dir=folder, prefix=".easymp-"):
                pass
    except OSError as error:
        raise _trouble(path, error) from error
    return Target(path, before)


def write(there: Target, text: str) -> Path | None:
    """Replace the file at once, so that a reader finds the old one or the new one; returns the copy of the old one.

    Raises:
        SettingError: the file was changed since it was looked at, or cannot be written; it is as it was.
    """
    place = there.path.resolve()
    try:
        if (place.read_bytes() if place.exists() else None) != there.before:
            raise SettingError(
                f"{there.path} was changed meanwhile and is left as it is: run the command again"
            )
        with contextlib.ExitStack() as undo:
            kept = None
            if there.before is not None:
                names = (place.with_name(f"{place.name}.bak{f'.{n}' if n else ''}") for n in count())
                kept = next(name for name in names if not name.exists())
                undo.callback(kept.unlink, missing_ok=True)
                _create(kept, there.before, place)
            temporary = place.with_name(f".{place.name}-{os.getpid()}")
            undo.callback(temporary.unlink, missing_ok=True)
            _create(temporary, text.encode(), place)
            os.replace(temporary, place)
            undo.pop_all()
    except OSError as error:
        raise _trouble(there.path, error) from error
    return kept


def _create(path: Path, content: bytes, like: Path) -> None:
    """A new file on the disk, with the owner and the mode of the file `like`, if there is one."""
    with open(path, "xb") as file:
        if like.exists():
            status = like.stat()
            if os.name == "posix" and os.geteuid() == 0:  # who alone gives files away
                os.chown(path, status.st_uid, status.st_gid)
            os.chmod(path, status.st_mode & 0o7777)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _trouble(path: Path, error: OSError) -> SettingError:
    return SettingError(f"{path} cannot be written: {error.strerror or error}; name another file by --file")
