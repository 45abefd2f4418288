"""Printing for commands: columns, colours where a terminal shows them, and lines that fit its width."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import textwrap
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from ..base import env
from ..errors import SettingError

MACHINE_HELP = "another machine: 8xH100, 2x8xA100-80GB (two nodes), 64x80GB, 4xcpu"  # of --for in several commands
BOLD, RED, GREEN, YELLOW = "1", "31", "32", "33"


def missing_packages(extra: str, *packages: str) -> str:
    """A sentence that names those of `packages` that are not installed, of an extra or of none; "" where all are."""
    names = [name for name in packages if find_spec(name) is None]
    if not names:
        return ""
    command = f"'easymp[{extra}]'" if extra else " ".join(names)
    return f"{' and '.join(names)} {'are' if names[1:] else 'is'} not installed: pip install {command}"


def require_packages(extra: str, *packages: str) -> None:
    """Raise SettingError with the line that installs those of `packages` that are missing."""
    if sentence := missing_packages(extra, *packages):
        raise SettingError(sentence)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, by KeyboardInterrupt, so that child processes are stopped."""
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def paint(text: str, code: str) -> str:
    """`text` in a colour on a terminal that has them: NO_COLOR and TERM=dumb turn them off (no-color.org)."""
    has_colours = sys.stdout.isatty() and not env.read("NO_COLOR") and env.read("TERM") != "dumb"
    return f"\x1b[{code}m{text}\x1b[0m" if text and code and has_colours else text


def width() -> int:
    """Columns of a line: the terminal's, at least 40; 100 where there is no terminal."""
    return max(40, shutil.get_terminal_size((100, 24)).columns)


def wrap(text: str, indent: str = "", columns: int = 0) -> str:
    """`text` in lines that fit the terminal, or at least `columns`; each but the first begins with `indent`."""
    fitting = max(width(), columns)
    return textwrap.fill(text, fitting, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def plain(text: str) -> str:
    """`text` with control characters escaped."""
    return text if text.isprintable() else repr(text)[1:-1]


def print_json(value: Any) -> int:
    """Print a value for programs, sets as sorted lists; returns the exit code 0."""
    print(json.dumps(value, indent=2, default=lambda v: sorted(v) if isinstance(v, Set) else str(v)))
    return 0


def table(rows: Sequence[Sequence[Any]], right: Set[int] = frozenset(), fold: bool = False) -> str:
    """Values in columns, those of `right` aligned on the right; None is an empty cell. `fold` wraps the last column."""
    text = [["" if cell is None else plain(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*text)]
    indent = " " * (sum(widths[:-1]) + 2 * (len(widths) - 1))
    lines = []
    for row in text:
        cells = [cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        line = "  ".join(cells).rstrip()
        lines.append(wrap(line, indent, len(indent) + 20) if fold else line)
    return "\n".join(lines)
