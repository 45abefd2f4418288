"""Layers, cycles and size of the package, and what its files may not do beside ruff's rules of pyproject.toml."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import easymp
from easymp.registry import ALIASES, PRECISIONS, STRATEGIES

PACKAGE = Path(easymp.__file__).parent
LAYERS, ROOT_MODULES, FILES, LINES, IN_CYCLES = 12, 12, 185, 50_570, 0  # ceilings
NAMES = {*PRECISIONS, *ALIASES, *STRATEGIES} - {"no"}  # which is an answer, too
# These know names: readers of other libraries' files, strategies and precisions, cards with bf16 units, the plan, the
# lists.
KNOW_NAMES = (
    *("cli/config/", "compat/deepspeed/", "compat/apex/", "strategies/", "precision/"),
    *("hardware/", "plan.py", "settings.py", "registry.py"),
)


@cache
def sources() -> dict[str, str]:
    """The text of each file, by its path below the package."""
    return {p.relative_to(PACKAGE).as_posix(): p.read_text(encoding="utf-8") for p in PACKAGE.rglob("*.py")}


@cache
def trees() -> list[tuple[str, ast.Module]]:
    return [(name, ast.parse(text)) for name, text in sources().items()]


def test_the_size_of_the_package() -> None:
    assert len([name for name in sources() if "/" not in name]) <= ROOT_MODULES
    assert len(sources()) <= FILES
    assert sum(len(text.splitlines()) for text in sources().values()) <= LINES


def test_imports_run_down(monkeypatch: pytest.MonkeyPatch) -> None:
    linter = pytest.importorskip("importlinter.cli")
    tool = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]
    assert len(tool["importlinter"]["contracts"][0]["layers"]) <= LAYERS
    monkeypatch.chdir(PACKAGE.parent)
    monkeypatch.setattr("logging.config.dictConfig", lambda config: None)  # switches existing loggers off
    assert linter.lint_imports(no_cache=True) == 0


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports under TYPE_CHECKING count."""
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph("easymp", cache_dir=None)
    imports: dict[str, set[str]] = {m: graph.find_modules_directly_imported_by(m) for m in graph.modules}
    while True:
        imported = set().union(*imports.values())
        rest = {m: f & imports.keys() for m, f in imports.items() if m in imported and f & imports.keys()}
        if rest == imports:
            break
        imports = rest
    assert len(imports) <= IN_CYCLES, imports


def comparisons(tree: ast.Module) -> Iterator[tuple[int, set[str]]]:
    """Lines that compare something with the name of a strategy or precision, or match on it."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Compare, ast.MatchValue)):
            words = {str(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant)}
            if words & NAMES:
                yield node.lineno, words & NAMES


def late_imports(tree: ast.Module) -> Iterator[tuple[int, set[str]]]:
    """Imports of easymp's own modules inside of functions: a cycle that is hidden."""
    for function in (n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))):
        for node in ast.walk(function):
            if isinstance(node, ast.ImportFrom) and (node.level or str(node.module).startswith("easymp")):
                yield node.lineno, {str(node.module)}
            if isinstance(node, ast.Import) and any(a.name.startswith("easymp") for a in node.names):
                yield node.lineno, {a.name for a in node.names}


# A rule, the files that are free of it, and code that breaks it.
RULES = [
    (comparisons, KNOW_NAMES, ["x == 'ddp'", "x in ('bf16', 'fp16')", "match x:\n    case 'single': pass"]),
    (late_imports, ("launcher/",), ["def f():\n    from . import plan", "def f():\n    import easymp.plan"]),
]


@pytest.mark.parametrize(("found", "allowed", "examples"), RULES)
def test_where_it_is_done(found, allowed, examples) -> None:
    for text in examples:
        assert list(found(ast.parse(text))), text
    assert not [(n, *f) for n, tree in trees() if not n.startswith(allowed) for f in found(tree)]
