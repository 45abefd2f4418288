"""Each promise of docs/guarantees.md has one row of docs/contributing/guarantee-tests.md, whose tests exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMANDS = {"`make wheel-test`": "Makefile"}


def rows(page: str, first_column: str) -> list[list[str]]:
    """The cells of the tables whose first column is called `first_column`."""
    found, inside = [], False
    for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        inside = line.startswith("|") and (inside or cells[0] == first_column)
        if inside and cells[0] != first_column and not cells[0].startswith("---"):
            found.append(cells)
    return found


def test_every_guarantee_has_a_test() -> None:
    promises = rows("guarantees.md", "promise")
    assert len(promises) > 30
    assert [row for row in promises if len(row) != 3 or not row[0] or not row[1]] == []
    tests_by_beginning = {row[0].removesuffix(" …"): row[1] for row in rows("contributing/guarantee-tests.md", "promise")}
    for beginning in tests_by_beginning:
        assert len([row for row in promises if row[0].startswith(beginning)]) == 1, beginning
    for promise, *_ in promises:
        beginnings = [beginning for beginning in tests_by_beginning if promise.startswith(beginning)]
        assert len(beginnings) == 1, promise
        tests = tests_by_beginning[beginnings[0]]
        named = re.findall(r"`([\w/.]+)::(\w+)`", tests)
        assert named or tests in COMMANDS, promise
        for file, name in named:
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), (promise, file, name)
