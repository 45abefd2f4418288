"""The tree on the page of the architecture: each file of easymp with the first clause of its docstring."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORDS = "which where when that as by with so for in beside behind from at if"  # that begin a clause after a comma
END = rf"[.:;] | \(|, (?=(?:{WORDS.replace(' ', '|')}|and what|and which)\b)"


def clause(path: Path) -> str:
    """The first sentence of a file's docstring, without the clauses that follow its main one."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split())
    return re.split(END, text)[0].rstrip(".")


def lines() -> list[str]:
    """One line a file."""
    package, found = ROOT / "easymp", []
    for path in sorted(package.rglob("*.py"), key=lambda p: (len(p.relative_to(package).parts) > 1, p)):
        name = path.relative_to(package).as_posix().removesuffix("__init__.py")
        if path.stat().st_size and name:
            found.append(f"{name:<34} {clause(path)}")
    return found


if __name__ == "__main__":
    print("\n".join(lines()))
