"""The table of Accelerate's names: what stands there is so, and Accelerate itself has no others.

``python -m tests.compat.test_accelerate_names`` prints the names of the Accelerate that is installed, in the form of
the table.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
import torch

import easymp.compat.accelerate as compat
from easymp import RefusedError
from easymp.compat.accelerate.plugins import INSTEAD, MEMBERS

TABLE = tomllib.loads(Path(__file__).with_name("accelerate_names.toml").read_text())
MODULES = [section for section in TABLE if section.rpartition(".")[2].islower()]
TORCHS = {*dir(torch.optim.Optimizer), *dir(torch.utils.data.DataLoader)}
REFUSED, ABSENT = "refused", "absent: "


def signature(value):
    """In words that are the same in every process; ``"property"`` and ``"value"`` for what has none."""
    if isinstance(value, property):
        return "property"
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return "value"
    words, keywords = [], False
    for parameter in found.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        mark = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords:
            words.append("*")
        keywords |= mark == "*" or parameter.kind is parameter.KEYWORD_ONLY
        default = "" if parameter.default is parameter.empty else f"={shown(parameter.default)}"
        words.append(f"{mark}{parameter.name}{default}")
    return f"({', '.join(words)})"


def shown(value):
    plain = value.value if isinstance(value, enum.Enum) else value
    if callable(plain) or type(plain) is object:
        return "…"
    return re.sub(r" at 0x\w+", "", repr(plain)).replace(str(Path.home()), "~")


def find(address):
    """The module or class at an address."""
    try:
        return importlib.import_module(address)
    except ModuleNotFoundError:
        module, _, name = address.rpartition(".")
        return getattr(importlib.import_module(module), name)


def parts(words):
    """The parameters in a signature."""
    found, depth = [""], 0
    for letter in words[1:-1]:
        depth += (letter in "([{<") - (letter in ")]}>")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [part.strip() for part in found if part.strip()]


def difference(ours, theirs):
    """What of a call written for `theirs` means another thing to `ours`, or does not fit; "" where nothing does."""
    if ours == theirs or not (ours.startswith("(") and theirs.startswith("(")):
        return ""
    here, there = parts(ours), parts(theirs)
    rest = any(part.startswith("**") for part in here)
    if rest and here[0].startswith("*") and here[0] != "*":
        return ""  # it takes anything
    named, found = {part.partition("=")[0]: part for part in here}, []
    for i, part in enumerate(there):
        name = part.partition("=")[0]
        anywhere = "*" in there or i >= len(here)
        fits = part in here and (anywhere or here.index(part) >= i)
        if fits or name.startswith("**") or (name not in named and rest):
            continue
        if name in named:
            found.append(f"{part} has another place" if named[name] == part else f"{part} is {named[name]}")
        else:
            found.append(f"no {part}")
    return "; ".join(found)


def of_module(address):
    module, found, wide = find(address), {}, address in ("accelerate", "accelerate.utils")
    for name in dir(module):
        value = getattr(module, name)
        if name[0] == "_" or isinstance(value, types.ModuleType) or not (callable(value) or name.isupper()):
            continue
        own = str(getattr(value, "__module__", ""))
        if (callable(value) or not wide) and not (own.startswith("accelerate") if wide else own == address):
            continue
        found[name] = signature(value)
    return found


def of_class(kind):
    if issubclass(kind, enum.Enum):
        return {member.name: repr(member.value) for member in kind}
    found = {}
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "accelerate":
            for name, value in vars(base).items():
                if not name.startswith("_") and name not in TORCHS:
                    found.setdefault(name, signature(value))
    return found


def wrong_in_module(module, name, theirs, said):
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


def wrong_in_class(kind, name, theirs, said):
    value = inspect.getattr_static(kind, name, inspect)
    if value is inspect:
        there = said.startswith(ABSENT) or (said == REFUSED and name in MEMBERS)
        return "" if there else f"{kind.__name__} has no {name}"
    ours = repr(value.value) if isinstance(value, enum.Enum) else signature(value)
    found = f"is {ours}" if isinstance(value, enum.Enum) and ours != theirs else difference(ours, theirs)
    same = "the same"
    return "" if found == said else f"{kind.__name__}.{name}: {found or same}, and not: {said or same}"


@pytest.mark.parametrize("section", TABLE)
def test_what_the_table_says_is_so(section):
    there, wrong = find(f"easymp.compat.{section}"), []
    for name, entry in TABLE[section].items():
        theirs, said = entry if isinstance(entry, list) else (entry, "")
        look = wrong_in_class if inspect.isclass(there) else wrong_in_module
        wrong.append(look(there, name, theirs, said))
    assert [words for words in wrong if words] == []


def test_refused_members_say_what_to_write():
    with compat.Accelerator(cpu=True) as acc:
        for name, instead in MEMBERS.items():
            with pytest.raises(AttributeError, match="Accelerator has no") as raised:
                getattr(acc, name)
            assert instead in str(raised.value)


@pytest.mark.slow
def test_accelerate_has_the_names_of_the_table():
    pytest.importorskip("accelerate")
    words = [sys.executable, "-m", __name__]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = tomllib.loads(done.stdout)
    for section, names in TABLE.items():
        ours = {name: entry[0] if isinstance(entry, list) else entry for name, entry in names.items()}
        assert theirs[section] == ours, section


if __name__ == "__main__":
    for address in TABLE:
        print(f'["{address}"]')
        for name, words in sorted((of_module(address) if address in MODULES else of_class(find(address))).items()):
            print(f"{name} = '''{words}'''")
