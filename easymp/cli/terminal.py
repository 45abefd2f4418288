"""What commands print with: columns, colours where a terminal shows them, and text that a narrow one can show.

Nothing here moves the cursor: what is printed can be read in a log of CI as well.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

from ..base import env

BOLD, DIM, RED, GREEN, YELLOW = "1", "2", "31", "32", "33"


def coloured() -> bool:
    """Whether standard output is a terminal that is asked for colours: NO_COLOR and TERM=dumb turn them off (no-color.org)."""
    return sys.stdout.isatty() and not env.read("NO_COLOR") and env.read("TERM") != "dumb"


def paint(text: str, code: str) -> str:
    """`text` in a colour, on a terminal; else as it is."""
    return f"\x1b[{code}m{text}\x1b[0m" if text and coloured() else text


def width() -> int:
    """Columns that a line may have: the terminal's, at least 40; 100 where there is none."""
    return max(40, shutil.get_terminal_size((100, 24)).columns)


def wrap(text: str, indent: str = "") -> str:
    """`text` in lines that fit, each line but the first after `indent`."""
    return textwrap.fill(
        text, width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def plain(text: str) -> str:
    """Somebody's words as a terminal may have them: what would move its cursor, or worse, is escaped."""
    return text if text.isprintable() else repr(text)[1:-1]


def table(
    rows: Sequence[Sequence[str]], right: frozenset[int] | set[int] = frozenset(), fold: bool = False
) -> str:
    """Columns under one another; those in `right` end together.

    Args:
        fold: the last column is broken into lines, so that a row fits the terminal.
    """
    rows = [list(map(plain, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    room = max(20, width() - sum(widths[:-1]) - 2 * (len(widths) - 1))
    lines = []
    for row in rows:
        cells = [
            cell.rjust(w) if i in right else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row[:-1], widths))
        ]
        last = row[-1].rjust(widths[-1]) if len(row) - 1 in right else row[-1]
        pieces = textwrap.wrap(last, room, break_long_words=False, break_on_hyphens=False) if fold else [last]
        lines.append("  ".join([*cells, pieces[0] if pieces else ""]).rstrip())
        lines += [" " * (sum(widths[:-1]) + 2 * (len(widths) - 1)) + piece for piece in pieces[1:]]
    return "\n".join(lines)
