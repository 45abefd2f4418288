"""Docstrings of public names: complete, and their examples run.

A method's example may stand in the docstring of its class. Examples begin with the names of `namespace`.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import doctest
import enum
import functools
import gc
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest
import torch
from torch import nn

import easymp
import easymp.nn
import easymp.optim
from easymp import errors

# Users make these or get them from `prepare`; the other names of easymp.optim are for easymp's packages.
OPTIM = "Engine EngineOptions LAMB LARC Lion Muon NovoGrad PreparedOptimizer PreparedScheduler".split()
# What they have beside torch's methods; other names without an underscore are for easymp's packages.
OPTIMIZERS_OWN = {"averaged", "clip_grad_norm_", "masters", "step", "step_was_skipped"}
MADE_BY_PREPARE = {"PreparedLoader", "PreparedOptimizer", "PreparedScheduler"}  # users do not call them
NOTHING = re.compile(r"'?(None|NoReturn|(Iterator|Generator|AbstractContextManager)\[None.*\])'?")
SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Example):")
ENTRY = re.compile(r"    (?=\S)\*{0,2}(\w+)(?: \([^)]*\))?: \S")


class Public(NamedTuple):
    name: str
    value: Any
    text: str  # the docstring
    owner: type | None = None


def members(kind: type) -> Iterator[tuple[str, Any, type]]:
    """The public functions and properties that classes of easymp give to `kind`, each with its class."""
    seen: set[str] = set()
    for base in kind.__mro__:
        for name, value in vars(base).items() if base.__module__.startswith("easymp") else ():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            function = function.func if isinstance(function, functools.cached_property) else function
            of_users = name in OPTIMIZERS_OWN or not base.__module__.startswith("easymp.optim")
            shown = of_users and not name.startswith("_")
            shown = shown and not hasattr(BaseException, name)  # Python documents add_note
            if shown and name not in seen and inspect.isfunction(function):
                yield name, value if isinstance(value, property) else function, base
            seen.add(name)


@functools.cache
def public() -> dict[str, Public]:
    found: dict[str, Public] = {}
    places: list[tuple[str, Any]] = [(name, getattr(easymp, name)) for name in easymp.__all__]
    places += [(f"optim.{name}", getattr(easymp.optim, name)) for name in OPTIM]
    places += [(f"nn.{name}", getattr(easymp.nn, name)) for name in easymp.nn.__all__]
    memory = ("Memory", "estimate", "fits")
    places += [(f"memory.{name}", getattr(easymp.memory, name)) for name in memory]
    for name, value in places:
        if isinstance(value, str):
            continue
        found[name] = Public(name, value, inspect.cleandoc(value.__doc__ or ""))
        for member, function, base in members(value) if inspect.isclass(value) else ():
            if issubclass(value, easymp.Part) and hasattr(easymp.Part, member) and value is not easymp.Part:
                continue  # an event, which `Part` describes
            where = f"{base.__name__}.{member}"
            found[where] = Public(where, function, inspect.cleandoc(function.__doc__ or ""), value)
    return found


def sections(text: str) -> dict[str, str]:
    """The text of each section, without its heading; "" holds what stands before the first."""
    parts, current = {"": ""}, ""
    for line in text.splitlines():
        if heading := SECTION.fullmatch(line):
            current = heading[1]
            parts[current] = ""
        else:
            parts[current] += line + "\n"
    return parts


def parameters(value: Any) -> list[str]:
    if inspect.isclass(value):
        if value.__name__ in MADE_BY_PREPARE or issubclass(value, (enum.Enum, BaseException, Protocol)):
            return []
        if dataclasses.is_dataclass(value):
            return [f.name for f in dataclasses.fields(value)]
        if "__init__" not in vars(value):
            return []
        value = value.__init__
    if isinstance(value, property) or not callable(value):
        return []
    return [name for name in inspect.signature(value).parameters if name not in ("self", "cls")]


def raised(value: Any) -> Iterator[type[BaseException]]:
    """The classes of errors in the ``raise`` statements of a function, or of a class when it is made."""
    if inspect.isclass(value):
        for name in ("__init__", "__post_init__"):
            if inspect.isfunction(vars(value).get(name)) and vars(value)[name].__module__ == value.__module__:
                yield from raised(vars(value)[name])
        return
    function = value.fget if isinstance(value, property) else value
    if not inspect.isfunction(function):
        return
    try:
        todo: list[ast.AST] = list(ast.parse(textwrap.dedent(inspect.getsource(function))).body)
    except OSError:  # a dataclass wrote it
        return
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Raise) and node.exc is not None:
            called = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            name = getattr(called, "id", "")
            kind = getattr(errors, name, getattr(builtins, name, None))
            if inspect.isclass(kind):
                yield kind
        todo += [n for n in ast.iter_child_nodes(node) if not isinstance(n, (ast.Lambda,))]


def explained(error: type[BaseException], text: str) -> bool:
    return any(base.__name__ in ENTRY.findall(text) for base in error.__mro__[:-2])


def gaps(item: Public) -> Iterator[str]:
    """What the docstring does not say."""
    parts = sections(item.text)
    if not parts[""].strip():
        yield "a summary"
    args = [parts.get("Args", ""), parts.get("Attributes", "")]
    if inspect.isclass(item.value) and "__init__" in vars(item.value):  # its bases say the rest
        bases = [sections(inspect.cleandoc(base.__doc__ or "")) for base in item.value.__mro__[:-1]]
        args += [text.get(part, "") for text in bases for part in ("Args", "Attributes")]
    if item.owner is easymp.Part:  # what several events get is said once
        args.append(sections(inspect.cleandoc(item.owner.__doc__ or ""))["Attributes"])
    told = re.findall(r"(?m)^    \*{0,2}(\w+)(?: \(|: )", "".join(args))
    yield from (f"Args: {name}" for name in parameters(item.value) if name not in told)
    if inspect.isfunction(item.value):
        returns = inspect.signature(item.value).return_annotation
        if not NOTHING.fullmatch(str(returns)) and not {"Returns", "Yields"} & parts.keys():
            yield "Returns"
    for error in raised(item.value):
        if not explained(error, parts.get("Raises", "")):
            yield f"Raises: {error.__name__}"
    whole = "\n\n".join(inspect.cleandoc(base.__doc__ or "") for base in (item.owner.__mro__ if item.owner else ()))
    shown = any(f".{item.name.split('.')[-1]}" in e.source for e in doctest.DocTestParser().get_examples(whole))
    # easymp calls the events of a part
    if ">>> " not in parts.get("Example", "") and not shown and item.owner is not easymp.Part:
        yield "Example"


def test_public_docstrings_are_complete() -> None:
    lacks = {name: list(dict.fromkeys(gaps(item))) for name, item in public().items()}
    assert not {name: missing for name, missing in lacks.items() if missing}


def namespace(example: doctest.DocTest) -> dict[str, Any]:
    """Names that an example may use without making them; docs/reference/api/index.md lists them for readers."""
    nodes = [node for each in example.examples for node in ast.walk(ast.parse(each.source))]
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names: dict[str, Any] = {}
    exec("import torch\nfrom torch import nn\nimport easymp\nfrom easymp import *", names)
    model = nn.Linear(2, 1)
    objects = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "loader": torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2),
    }
    if "acc" in used - assigned:
        acc = names["acc"] = easymp.Accelerator(cpu=True)
        used |= {"model"} if "optimizer" in used else set()
        objects = {name: acc.prepare(value) if name in used else value for name, value in objects.items()}
    return names | objects


@pytest.mark.parametrize("name", [name for name, item in public().items() if ">>> " in item.text])
def test_an_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = doctest.DocTestParser().get_doctest(public()[name].text, {}, name, None, 0)
    said: list[str] = []
    say: Callable[[str], Any] = said.append
    state = torch.random.get_rng_state()
    example.globs = namespace(example)
    try:
        result = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(example, out=say)
    finally:
        torch.random.set_rng_state(state)
        gc.collect()  # closes what the example left open
    assert not result.failed, "".join(said)
