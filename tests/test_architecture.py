"""What the house promises of its own text: no branch on a strategy or precision outside its room, own imports at the top."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import easymp
from easymp.precision import ALIASES, PRECISIONS
from easymp.strategies import STRATEGIES

HOUSE = Path(easymp.__file__).parent
NAMES = {*PRECISIONS, *ALIASES, *STRATEGIES}
# hardware's words are units of a card, not decisions.
ROOMS = ("precision/", "strategies/", "hardware/")
# plan holds the tables of the decision; settings lists the allowed words.
TABLES = {"plan.py", "settings.py"}
# The peer's word for fp32 is "no": a name it asks us to report, not a decision.
REPORTED = {"accelerator.py", "state.py", "processes.py"}


@cache
def trees() -> list[tuple[str, ast.Module]]:
    return [
        (path.relative_to(HOUSE).as_posix(), ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(HOUSE.rglob("*.py"))
    ]


def words(node: ast.AST) -> set[str]:
    return {
        n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    } & NAMES


def comparisons(tree: ast.Module) -> Iterator[tuple[int, set[str]]]:
    """Lines that compare something with the name of a strategy or precision, or match on it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            found = set().union(*(words(side) for side in (node.left, *node.comparators)))
        elif isinstance(node, ast.MatchValue):
            found = words(node)
        else:
            continue
        if found:
            yield node.lineno, found


def test_nobody_compares_with_the_name_of_a_strategy_or_precision() -> None:
    found = []
    for name, tree in trees():
        if name.startswith(ROOMS) or name in TABLES:
            continue
        for line, compared in comparisons(tree):
            if not (name in REPORTED and compared == {"fp32"}):
                found.append(f"{name}:{line} {compared}")
    assert not found


def test_the_check_finds_what_it_looks_for() -> None:
    for text in (
        "x == 'ddp'",
        "x in ('bf16', 'fp16')",
        "match x:\n    case 'single': pass",
        "f(x) != 'half'",
    ):
        assert list(comparisons(ast.parse(text))), text


def test_our_own_modules_are_imported_at_the_top() -> None:
    """A late import of our own module is a cycle admitting itself; but a worker's entry may wait with torch."""
    late = []
    for name, tree in trees():
        if name.startswith("launcher/"):
            continue
        for function in (n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))):
            for node in ast.walk(function):
                own = isinstance(node, ast.ImportFrom) and (
                    node.level or (node.module or "").startswith("easymp")
                )
                own = own or (
                    isinstance(node, ast.Import) and any(a.name.startswith("easymp") for a in node.names)
                )
                if own:
                    late.append(f"{name}:{node.lineno}")
    assert not late


def test_every_file_says_what_it_is() -> None:
    silent = [name for name, tree in trees() if tree.body and not ast.get_docstring(tree)]
    assert not silent


def test_the_facade_fits() -> None:
    sizes = sorted(len(path.read_text(encoding="utf-8").splitlines()) for path in HOUSE.rglob("*.py"))
    assert sizes[len(sizes) // 2] < 100
    assert len((HOUSE / "accelerator.py").read_text(encoding="utf-8").splitlines()) < 1000


def test_one_file_only_reads_what_can_run_code() -> None:
    """By its word, in code and prose alike, so that a search finds that file and nothing else; and by what would do it unnamed."""
    guarded = "checkpoint/accelerate_folder.py"
    said = {
        path.relative_to(HOUSE).as_posix()
        for path in HOUSE.rglob("*.py")
        if "pickle" in path.read_text(encoding="utf-8")
    }
    assert said == {guarded}
    found = set()
    for name, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.save", "torch.load"):
                found.add(name)
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                modules = (
                    {a.name for a in node.names} if isinstance(node, ast.Import) else {node.module or ""}
                )
                found |= {name} if modules & {"shelve", "marshal", "dill", "cloudpickle"} else set()
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "eval":
                found.add(name)
    assert found == {guarded}
