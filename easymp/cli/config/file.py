"""The project file: composed anew, or edited so that comments and other keys stay; replaced at once, with a copy kept."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import textwrap
import tomllib
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from ...base.units import UNITS
from ...errors import SettingError
from ...settings import LAUNCH, LAUNCHING, NAMES, checked, statements
from .rules import KNOWN, SENTENCES

WIDTH = 78
WHY = "# here: "  # begins a comment of ours, which goes with its value
EXAMPLES = SENTENCES["examples"]
HEAD = """\
# The settings of this project's runs; arguments in a script and variables that
# begin with EASYMP_ win over them. Written by `easymp config`, and yours to edit.
"""


# -- text


def literal(value: Any) -> str:
    """`value` as TOML writes it."""
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(k)} = {literal(v)}" for k, v in value.items())
        return f"{{ {inside} }}" if value else "{}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else json.dumps(name)


def _plain(name: str, value: Any) -> Any:
    """The value of a setting as it is written: sizes in the largest unit that holds them exactly."""
    if name not in KNOWN or not str(KNOWN[name].type).startswith("Size") or not isinstance(value, int):
        return value
    units = [unit for unit in ("TiB", "GiB", "GB", "MiB") if value % UNITS[unit.lower()] == 0]
    return f"{int(value // UNITS[units[0].lower()])}{units[0]}" if units else value


def line(name: str, value: Any, why: str = "") -> str:
    """A setting with its value, and why it has it here."""
    return f"{_key(name)} = {literal(_plain(name, value))}{_because(why)}"


def _because(why: str) -> str:
    return f"  {WHY}{' '.join(why.split())}" if why else ""


def unset(name: str) -> str:
    """A comment that shows a setting's default, or an example where it has none."""
    default = KNOWN[name].default
    example = f"# {line(name, EXAMPLES[name])}  # an example" if default is None else ""
    return example or f"# {line(name, default)}"


def said(values: Mapping[str, Any]) -> list[str]:
    """The lines that set `values`, those of tables with dotted keys."""
    flat = {".".join(keys): value for keys, value in _flat(values).items() if value is not None}
    return [f"{keys} = {literal(flat[keys])}" for keys in sorted(flat, key=lambda keys: "." in keys)]


def compose(values: Mapping[str, Any], whys: Mapping[str, str]) -> str:
    """A whole file: `values` that are not None are set; the other settings are shown commented out, with their defaults."""

    def blocks(fields: Mapping[str, Any]) -> str:
        shown = []
        for name in sorted(fields, key=lambda name: values.get(name) is None):  # stable
            help, value = str(fields[name].metadata["help"]), values.get(name)
            comment = textwrap.wrap(f"{help[0].upper()}{help[1:]}", WIDTH - 2, break_on_hyphens=False)
            last = unset(name) if value is None else line(name, value, whys.get(name, ""))
            shown.append("\n".join([*(f"# {words}" for words in comment), last]))
        return "\n\n".join(shown)

    tables = {name: value for name, value in values.items() if isinstance(value, Mapping)}
    sections = "".join(
        f"\n[{name}]\n" + "".join(f"{line(k, v)}\n" for k, v in t.items()) for name, t in tables.items()
    )
    top = blocks({name: field for name, field in NAMES.items() if name not in tables})
    return f"{HEAD}\n{top}\n{sections}\n[{LAUNCH}]\n{blocks(LAUNCHING)}\n"


# -- editing

Keys = tuple[str, ...]  # ("seed",), ("launch", "processes"), ("strategy_options", "wrap")


def edit(text: str, values: Mapping[str, Any], whys: Mapping[str, str]) -> str:
    """`text` with these values; None comments a setting out. Comments and all other keys stay."""
    new, there = text.replace("\r\n", "\n").rstrip("\n") + "\n", tomllib.loads(text)
    changed = {name: value for name, value in values.items() if not _says(there, name, value)}
    before, wanted = _flat(there), _flat(changed)
    gone = dict.fromkeys(keys for keys in before if keys[0] in changed and keys not in wanted)
    goal = {keys: value for keys, value in {**before, **gone, **wanted}.items() if value is not None}
    for keys, value in {**gone, **wanted}.items():
        if before.get(keys) != value:
            new = _put(new, keys, value, whys.get(keys[-1], ""))
    with contextlib.suppress(tomllib.TOMLDecodeError):
        if _flat(tomllib.loads(new)) == goal:
            return new.replace("\n", "\r\n") if "\r\n" in text else new
    by_hand = [f"without {name}" if value is None else line(name, value) for name, value in changed.items()]
    how = "; ".join(by_hand)
    raise SettingError(f"the file is written in a way that cannot be edited from here; by hand, write {how}")


def _flat(values: Mapping[str, Any]) -> dict[Keys, Any]:
    """Each value as it is written, by its keys."""
    found: dict[Keys, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= {(name, key): list(v) if isinstance(v, tuple) else v for key, v in value.items()}
        else:
            found[(LAUNCH, name) if name in LAUNCHING else (name,)] = _plain(name, value)
    return found


def _says(content: Mapping[str, Any], name: str, value: Any) -> bool:
    written = (content.get(LAUNCH, {}) if name in LAUNCHING else content).get(name)
    if written is None or value is None:
        return written is value
    return bool(checked(KNOWN[name], written, "") == value)


def _put(text: str, keys: Keys, value: Any, why: str) -> str:
    """`text` with a value: in place of the old one, of the comment that shows its default, or on a line of its own. None removes it."""
    table, name, there = keys[:-1], keys[-1], list(statements(text))
    why, shown = _because(why), unset(name) if name in KNOWN else ""
    new = f"{_key(name)} = {literal(value)}{why}\n"
    for s in there:
        if s.keys == keys:
            rest = text[s.stop : s.end].rstrip()
            rest, bare = (why, "") if rest.strip().startswith(WHY) else (rest, rest)
            new = shown and shown + bare
            if value is not None:
                new = text[s.begin : s.start] + literal(value) + rest
            only = [t for t in there if t.table == table] if not new else []
            begin = only[0].begin if len(only) == 2 else s.begin  # with its header
            return text[:begin] + (new and f"{new}\n") + text[s.end :]
        if table and s.keys == table:  # an inline table
            read = {**tomllib.loads(f"v = {text[s.start : s.stop]}")["v"], name: value}
            kept = {k: v for k, v in read.items() if v is not None}
            return text[: s.start] + literal(kept) + text[s.stop :]
    for found in re.finditer(rf"(?m)^{re.escape(shown)}\n", text) if shown else ():
        if [(), *(s.table for s in there if s.begin < found.start())][-1] == table:
            return text[: found.start()] + new + text[found.end() :]
    inside = [s.end for s in there if s.table == table]
    dotted = [s.end for s in there if table and not inside and s.keys[:1] == table]
    for end in (inside or dotted)[-1:]:
        return text[:end] + (f"{table[0]}.{new}" if dotted else new) + text[end:]
    if table:
        return f"{text}\n[{table[0]}]\n{new}"
    above = text
    if there:  # comments right above a header are the table's
        above = re.sub(r"(?m)(^#.*\n)+\Z", "", text[: there[0].begin])
    return above + new + text[len(above) :]


# -- the disk


class Target(NamedTuple):
    """Where the file goes, and the bytes that are there; None for no file."""

    path: Path
    before: bytes | None


def target(path: Path, writable: bool = True) -> Target:
    """Look at `path`, and with `writable` make sure that it can be written."""
    with _errors(path):
        folder = path.resolve().parent
        if not folder.is_dir():
            raise SettingError(f"there is no folder {folder} for {path}: make it first, or pass --file")
        if path.exists() and not path.is_file():
            raise SettingError(f"{path} is not an ordinary file: name a file by --file, such as easymp.toml")
        before = path.read_bytes() if path.exists() else None
        if writable:
            with tempfile.TemporaryFile(dir=folder, prefix=".easymp-"):
                pass
    return Target(path, before)


def write(there: Target, text: str) -> Path | None:
    """Replace the file at once, so that a reader finds the old one or the new one; returns the copy of the old one."""
    place, kept = there.path.resolve(), None
    with _errors(there.path), contextlib.ExitStack() as undo:
        if (place.read_bytes() if place.exists() else None) != there.before:
            raise SettingError(f"{there.path} was changed meanwhile and is left as it is: run it again")
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
            if os.name == "posix" and os.geteuid() == 0:  # only root gives files away
                os.chown(path, like.stat().st_uid, like.stat().st_gid)
            shutil.copymode(like, path)
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
