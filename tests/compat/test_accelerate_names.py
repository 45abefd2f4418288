"""The table of Accelerate's names: what stands there is so, and Accelerate itself has no others."""

from __future__ import annotations

import enum
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import easymp.compat.accelerate as compat
from easymp import RefusedError
from easymp.compat.accelerate.plugins import INSTEAD, MEMBERS

from .accelerate_names import difference, find, signature

TABLE: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("accelerate_names.toml").read_text()
)
REFUSED, ABSENT = "refused", "absent: "


def wrong_in_module(module: Any, name: str, theirs: str, said: str) -> str:
    try:
        value = getattr(module, name)
    except ImportError as error:
        return "" if said == REFUSED and INSTEAD[name] in str(error) else f"{name}: {error}"
    if said != REFUSED:
        found = difference(signature(value), theirs)
        return "" if found == said else f"{name}: {found or 'the same'}, and not: {said or 'the same'}"
    try:
        value()
    except RefusedError as error:
        return "" if INSTEAD[name] in str(error) else f"{name}: {error}"
    return f"{name} is not refused"


def wrong_in_class(kind: type, name: str, theirs: str, said: str) -> str:
    value = inspect.getattr_static(kind, name, inspect)
    if value is inspect:
        there = said.startswith(ABSENT) or (said == REFUSED and name in MEMBERS)
        return "" if there else f"{kind.__name__} has no {name}"
    ours = repr(value.value) if isinstance(value, enum.Enum) else signature(value)
    found = f"is {ours}" if isinstance(value, enum.Enum) and ours != theirs else difference(ours, theirs)
    return (
        ""
        if found == said
        else f"{kind.__name__}.{name}: {found or 'the same'}, and not: {said or 'the same'}"
    )


@pytest.mark.parametrize("section", TABLE)
def test_what_the_table_says_is_so(section: str) -> None:
    there, wrong = find(f"easymp.compat.{section}"), []
    for name, entry in TABLE[section].items():
        theirs, said = entry if isinstance(entry, list) else (entry, "")
        look = wrong_in_class if inspect.isclass(there) else wrong_in_module
        wrong.append(look(there, name, theirs, said))
    assert [words for words in wrong if words] == []


def test_refused_members_say_what_to_write() -> None:
    with compat.Accelerator(cpu=True) as acc:
        for name, instead in MEMBERS.items():
            with pytest.raises(AttributeError, match="Accelerator has no") as raised:
                getattr(acc, name)
            assert instead in str(raised.value)


@pytest.mark.slow
def test_accelerate_has_the_names_of_the_table() -> None:
    pytest.importorskip("accelerate")
    words = [sys.executable, "-m", "tests.compat.accelerate_names"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-3000:]
    ours = {
        section: {name: entry[0] if isinstance(entry, list) else entry for name, entry in names.items()}
        for section, names in TABLE.items()
    }
    assert tomllib.loads(done.stdout) == ours
