"""The project file: composed anew, or edited so that comments and other keys stay; replaced at once, with a copy kept."""

from __future__ import annotations

import contextlib
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
from .rules import KNOWN

WIDTH = 78
WHY = "# here: "  # begins a comment of ours, which goes with its value
HEAD = """\
# The settings of this project's runs; arguments in a script and variables that
# begin with EASYMP_ win over them. Written by `easymp config`, and yours to edit.
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
    "max_restarts": 3,
    "nonfinite": "warn",
    "compile": "blocks",
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
    return str(value).lower() if isinstance(value, bool) else repr(value)


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
    default = KNOWN[name].default
    return f"# {line(name, EXAMPLES[name])}  # an example" if default is None else f"# {line(name, default)}"


def compose(values: Mapping[str, Any], whys: Mapping[str, str], options: Mapping[str, Any]) -> str:
    """A whole file: `values` that are not None are set; the other settings are shown commented out, with their defaults."""

    def blocks(fields: Mapping[str, Any]) -> str:
        said = []
        for name in sorted(fields, key=lambda name: values.get(name) is None):  # stable
            help, value = str(fields[name].metadata["help"]), values.get(name)
            comment = textwrap.wrap(f"{help[0].upper()}{help[1:]}", WIDTH - 2, break_on_hyphens=False)
            last = unset(name) if value is None else line(name, value, whys.get(name, ""))
            said.append("\n".join([*(f"# {words}" for words in comment), last]))
        return "\n\n".join(said)

    table = "\n".join(f"{name} = {literal(value)}" for name, value in options.items())
    table = f"\n[{OPTIONS}]\n{table}\n" if table else ""
    return f"{HEAD}\n{blocks(NAMES)}\n{table}\n[{LAUNCH}]\n{blocks(LAUNCHING)}\n"


# -- editing

REMOVED = "easymp: to be removed"


def edit(text: str, values: Mapping[str, Any], whys: Mapping[str, str], options: Mapping[str, Any]) -> str:
    """`text` with these values; None comments a setting out. Comments and all other keys stay.

    `options` join those of the file; where the strategy changes, the file's go.

    Raises:
        SettingError: tomlkit is missing, or the file is written in a way that it cannot edit.
    """
    there = tomllib.loads(text)
    changed = {name: _plain(name, value) if value is not None else None for name, value in values.items()}
    changed = {name: value for name, value in changed.items() if not _says(there, name, values[name])}
    old = there.get(OPTIONS, {})
    wanted: dict[str, Any] = {name: list(v) if isinstance(v, tuple) else v for name, v in options.items()}
    wanted = {**({} if "strategy" in changed else old), **wanted}
    if not changed and wanted == old:
        return text
    launch = {k: v for k, v in {**there.get(LAUNCH, {}), **_of(changed, LAUNCHING)}.items() if v is not None}
    goal = {k: v for k, v in {**there, **_of(changed, NAMES)}.items() if v is not None}
    goal |= {LAUNCH: launch, OPTIONS: wanted}
    plain = text.replace("\r\n", "\n").rstrip("\n") + "\n"
    tomlkit = library("tomlkit", "to edit an existing file")
    for start in (_uncommented(plain, changed, whys), plain.removeprefix("\n")):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            edited = _edited(tomlkit, start, changed, whys, wanted, old)
            if {LAUNCH: {}, OPTIONS: {}, **tomllib.loads(edited)} == goal:
                return edited.replace("\n", "\r\n") if "\r\n" in text else edited
    said = [f"without {name}" if v is None else line(name, values[name]) for name, v in changed.items()]
    raise SettingError(
        f"the file is written in a way that cannot be edited from here; by hand, write {'; '.join(said)}"
    )


def _of(changed: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in changed.items() if name in fields}


def _says(content: Mapping[str, Any], name: str, value: Any) -> bool:
    written = (content.get(LAUNCH, {}) if name in LAUNCHING else content).get(name)
    if written is None or value is None:
        return written is value
    return bool(checked(KNOWN[name], written, "") == value)


def _uncommented(text: str, changed: Mapping[str, Any], whys: Mapping[str, str]) -> str:
    """`text` with new values in place of the comments that show their defaults."""
    for name, value in changed.items():
        if value is not None:
            new = f"{name} = {literal(value)}" + (
                f"  {WHY}{' '.join(whys[name].split())}" if whys.get(name) else ""
            )
            text = re.sub(rf"(?m)^{re.escape(unset(name))}$", lambda m, new=new: new, text, count=1)
    return text


def _edited(
    tomlkit: Any, text: str, changed: Mapping[str, Any], whys: Mapping[str, str], options: Any, old: Any
) -> str:
    document = tomlkit.parse(text)
    for name, value in changed.items():
        if name in LAUNCHING and LAUNCH not in document:
            document[LAUNCH] = tomlkit.table()
        table = document[LAUNCH] if name in LAUNCHING else document
        inline, before = isinstance(table, tomlkit.items.InlineTable), table.get(name)
        if value is None and inline:
            table.pop(name, None)
        elif value is None or before is None or tomlkit.item(before).unwrap() != value:
            item, why = tomlkit.item(REMOVED if value is None else value), whys.get(name, "")
            comment = before.trivia.comment if hasattr(before, "trivia") else ""
            if why and not inline and (before is None or comment.startswith(WHY)):
                item.comment(f"{WHY}{' '.join(why.split())}".removeprefix("# "))
                item.trivia.comment_ws = "  "
            table[name] = item
    if options and old and options.items() >= old.items():
        document[OPTIONS].update(options)
    elif options != old:
        document.pop(OPTIONS, None)
        if options:
            document[OPTIONS] = tomlkit.item(options)
    return re.sub(
        rf'(?m)^.*\b(\w+)["\']?\s*=\s*"{REMOVED}"[ \t]*(.*)$', _commented_out, tomlkit.dumps(document)
    )


def _commented_out(found: re.Match[str]) -> str:
    name, comment = found.groups()
    return unset(name) + (f"  {comment}" if comment and not comment.startswith(WHY) else "")


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
    with _errors(path):
        folder = path.resolve().parent
        if not folder.is_dir():
            raise SettingError(
                f"there is no folder {folder} for {path}: make it first, or name another file by --file"
            )
        if path.exists() and not path.is_file():
            raise SettingError(f"{path} is not an ordinary file: name a file by --file, such as easymp.toml")
        before = path.read_bytes() if path.exists() else None
        if writable:
            with tempfile.TemporaryFile(dir=folder, prefix=".easymp-"):
                pass
    return Target(path, before)


def write(there: Target, text: str) -> Path | None:
    """Replace the file at once, so that a reader finds the old one or the new one; returns the copy of the old one.

    Raises:
        SettingError: the file was changed since it was looked at, or cannot be written; it is as it was.
    """
    place = there.path.resolve()
    with _errors(there.path), contextlib.ExitStack() as undo:
        if (place.read_bytes() if place.exists() else None) != there.before:
            raise SettingError(
                f"{there.path} was changed meanwhile and is left as it is: run the command again"
            )
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
    return kept


def _create(path: Path, content: bytes, like: Path) -> None:
    """A new file on the disk, with the owner and the mode of the file `like`, if there is one."""
    with open(path, "xb") as file:
        if like.exists():
            status = like.stat()
            if os.name == "posix" and os.geteuid() == 0:  # only root gives files away
                os.chown(path, status.st_uid, status.st_gid)
            os.chmod(path, status.st_mode & 0o7777)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _errors(path: Path) -> Any:
    try:
        yield
    except OSError as error:
        said = f"{path} cannot be written: {error.strerror or error}; name another file by --file"
        raise SettingError(said) from error
