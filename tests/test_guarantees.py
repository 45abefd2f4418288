"""Each row of the table of guarantees names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORDS = 6  # columns of the matrix of words and strategies
COMMANDS = {"`make wheel-test`": "Makefile"}


def test_every_guarantee_has_a_test() -> None:
    lines = (ROOT / "docs" / "guarantees.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    rows = [r for r in rows if r[0] != "promise" and not r[0].startswith("---") and len(r) != WORDS]
    assert len(rows) > 30
    for row in rows:
        assert len(row) == 4 and row[0] and row[1], row
        named = re.findall(r"`([\w/.]+)::(\w+)`", row[3])
        assert named or row[3] in COMMANDS, row
        for file, name in named:
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), (row[0], file, name)
