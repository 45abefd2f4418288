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
from easymp.compat.accelerate.plugins import layer

TABLE = tomllib.loads(Path(__file__).with_name("accelerate_names.toml").read_text())
MODULES = [section for section in TABLE if section.rpartition(".")[2].islower()]
TORCHS = {*dir(torch.optim.Optimizer), *dir(torch.utils.data.DataLoader)}
REFUSED, ABSENT = "refused", "absent: "


def signature(value):
    """A signature as text, the same in every process; ``"property"`` or ``"value"`` for what has none."""
    if isinstance(value, property):
        return "property"
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    try:
        parameters = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return "value"
    texts, in_keywords = [], False
    for parameter in parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        mark = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        if parameter.kind is parameter.KEYWORD_ONLY and not in_keywords:
            texts.append("*")
        in_keywords |= mark == "*" or parameter.kind is parameter.KEYWORD_ONLY
        default = "" if parameter.default is parameter.empty else f"={shown(parameter.default)}"
        texts.append(f"{mark}{parameter.name}{default}")
    return f"({', '.join(texts)})"


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


def parts(text):
    """The parameters in a signature."""
    parameters, depth = [""], 0
    for character in text[1:-1]:
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and not depth:
            parameters.append("")
        else:
            parameters[-1] += character
    return [part.strip() for part in parameters if part.strip()]


def difference(ours, theirs):
    """What of a call written for `theirs` means another thing to `ours`, or does not fit; "" where nothing does."""
    if ours == theirs or not (ours.startswith("(") and theirs.startswith("(")):
        return ""
    our_parameters, their_parameters = parts(ours), parts(theirs)
    takes_keywords = any(part.startswith("**") for part in our_parameters)
    if takes_keywords and our_parameters[0].startswith("*") and our_parameters[0] != "*":
        return ""  # it takes anything
    by_name, differences = {part.partition("=")[0]: part for part in our_parameters}, []
    for i, part in enumerate(their_parameters):
        name = part.partition("=")[0]
        anywhere = "*" in their_parameters or i >= len(our_parameters)
        fits = part in our_parameters and (anywhere or our_parameters.index(part) >= i)
        if fits or name.startswith("**") or (name not in by_name and takes_keywords):
            continue
        if name in by_name:
            differences.append(f"{part} has another place" if by_name[name] == part else f"{part} is {by_name[name]}")
        else:
            differences.append(f"no {part}")
    return "; ".join(differences)


def of_module(address):
    module, signatures, of_package = find(address), {}, address in ("accelerate", "accelerate.utils")
    for name in dir(module):
        value = getattr(module, name)
        if name[0] == "_" or isinstance(value, types.ModuleType) or not (callable(value) or name.isupper()):
            continue
        home = str(getattr(value, "__module__", ""))
        if (callable(value) or not of_package) and not (
            home.startswith("accelerate") if of_package else home == address
        ):
            continue
        signatures[name] = signature(value)
    return signatures


def of_class(kind):
    if issubclass(kind, enum.Enum):
        return {member.name: repr(member.value) for member in kind}
    signatures = {}
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "accelerate":
            for name, value in vars(base).items():
                if not name.startswith("_") and name not in TORCHS:
                    signatures.setdefault(name, signature(value))
    return signatures


def wrong_in_module(module, name, theirs, expected):
    try:
        value = getattr(module, name)
    except ImportError as error:
        return "" if expected == REFUSED and layer.instead[name] in str(error) else f"{name}: {error}"
    if expected != REFUSED:
        actual = difference(signature(value), theirs)
        return "" if actual == expected else f"{name}: {actual or 'the same'}, and not: {expected or 'the same'}"
    try:
        value()
    except RefusedError as error:
        return "" if layer.instead[name] in str(error) else f"{name}: {error}"
    return f"{name} is not refused"


def wrong_in_class(kind, name, theirs, expected):
    value = inspect.getattr_static(kind, name, inspect)
    if value is inspect:
        is_absent = expected.startswith(ABSENT) or (expected == REFUSED and name in layer.members)
        return "" if is_absent else f"{kind.__name__} has no {name}"
    ours = repr(value.value) if isinstance(value, enum.Enum) else signature(value)
    actual = f"is {ours}" if isinstance(value, enum.Enum) and ours != theirs else difference(ours, theirs)
    same = "the same"
    return "" if actual == expected else f"{kind.__name__}.{name}: {actual or same}, and not: {expected or same}"


@pytest.mark.parametrize("section", TABLE)
def test_what_the_table_says_is_so(section):
    item, wrong = find(f"easymp.compat.{section}"), []
    for name, entry in TABLE[section].items():
        theirs, expected = entry if isinstance(entry, list) else (entry, "")
        look = wrong_in_class if inspect.isclass(item) else wrong_in_module
        wrong.append(look(item, name, theirs, expected))
    assert [text for text in wrong if text] == []


def test_refused_members_say_what_to_write():
    with compat.Accelerator(cpu=True) as acc:
        for name, instead in layer.members.items():
            with pytest.raises(AttributeError, match="Accelerator has no") as raised:
                getattr(acc, name)
            assert instead in str(raised.value)


@pytest.mark.slow
def test_accelerate_has_the_names_of_the_table():
    pytest.importorskip("accelerate")
    command = [sys.executable, "-m", __name__]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert process.returncode == 0, process.stderr[-3000:]
    theirs = tomllib.loads(process.stdout)
    for section, names in TABLE.items():
        ours = {name: entry[0] if isinstance(entry, list) else entry for name, entry in names.items()}
        assert theirs[section] == ours, section


if __name__ == "__main__":
    for address in TABLE:
        print(f'["{address}"]')
        for name, words in sorted((of_module(address) if address in MODULES else of_class(find(address))).items()):
            print(f"{name} = '''{words}'''")
