"""Each promise of docs/guarantees.md has a line of docs/contributing/guarantee-tests.md, whose tests exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMANDS = {"`make wheel-test`": "Makefile"}


def promises() -> list[list[str]]:
    """The rows of the tables of promises: promise, where it holds, what happens elsewhere."""
    found, inside = [], False
    for line in (ROOT / "docs/guarantees.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        inside = line.startswith("|") and (inside or cells[0] == "promise")
        if inside and cells[0] != "promise" and not cells[0].startswith("---"):
            found.append(cells)
    return found


def test_every_guarantee_has_a_test() -> None:
    page = (ROOT / "docs/contributing/guarantee-tests.md").read_text(encoding="utf-8")
    tests = dict(re.findall(r"^- (.+?)…: (.+)$", page, re.MULTILINE))
    rows = promises()
    assert len(rows) > 30
    for beginning in tests:
        assert len([row for row in rows if row[0].startswith(beginning)]) == 1, beginning
    for row in rows:
        assert len(row) == 3 and row[0] and row[1], row
        (beginning,) = [beginning for beginning in tests if row[0].startswith(beginning)]
        named = re.findall(r"`([\w/.]+)::(\w+)`", tests[beginning])
        assert named or tests[beginning] in COMMANDS, row
        for file, name in named:
            text = (ROOT / file).read_text(encoding="utf-8")
            assert re.search(rf"^def {name}\(", text, re.MULTILINE), (row[0], file, name)
