"""Printing for commands: columns, colours where a terminal shows them, and lines that fit its width."""

from __future__ import annotations

import importlib
import json
import shutil
import signal
import sys
import textwrap
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

from ..base import env
from ..errors import SettingError

BOLD, DIM, RED, GREEN, YELLOW = "1", "2", "31", "32", "33"


def library(name: str, purpose: str) -> Any:
    """A library of the extra `easymp[cli]`. Raises SettingError with the line that installs it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise SettingError(f"{name} is needed {purpose}, and missing: pip install 'easymp[cli]'") from error


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, by KeyboardInterrupt: child processes and temporary folders go with it."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def coloured() -> bool:
    """Whether standard output is a terminal with colours: NO_COLOR and TERM=dumb turn them off (no-color.org)."""
    return sys.stdout.isatty() and not env.read("NO_COLOR") and env.read("TERM") != "dumb"


def paint(text: str, code: str) -> str:
    """`text` in a colour, on a terminal; else as it is."""
    return f"\x1b[{code}m{text}\x1b[0m" if text and code and coloured() else text


def width() -> int:
    """Columns that a line may have: the terminal's, at least 40; 100 where there is none."""
    return max(40, shutil.get_terminal_size((100, 24)).columns)


def wrap(text: str, indent: str = "") -> str:
    """`text` in lines that fit, each line but the first after `indent`."""
    return textwrap.fill(
        text, width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def plain(text: str) -> str:
    """`text` without control characters, which are escaped."""
    return text if text.isprintable() else repr(text)[1:-1]


def print_json(value: Any) -> int:
    """Print a value for programs, sets as sorted lists; returns the exit code 0."""
    print(json.dumps(value, indent=2, default=lambda v: sorted(v) if isinstance(v, Set) else str(v)))
    return 0


def table(rows: Sequence[Sequence[Any]], right: Set[int] = frozenset(), fold: bool = False) -> str:
    """Values in columns; None is an empty cell."""
    text = [["" if cell is None else plain(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*text)]
    before = sum(widths[:-1]) + 2 * (len(widths) - 1)  # columns left of the last one
    lines = []
    for row in text:
        cells = [
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))
        ]
        last = cells.pop().rstrip()
        options = {"break_long_words": False, "break_on_hyphens": False}
        pieces = textwrap.wrap(last, max(20, width() - before), **options) if fold else [last]
        lines.append("  ".join([*cells, *pieces[:1]]).rstrip())
        lines += [" " * before + piece for piece in pieces[1:]]
    return "\n".join(lines)
