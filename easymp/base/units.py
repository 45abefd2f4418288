"""Formats for people: bytes (also read), rates, seconds, and columns of text; and flat names of nested settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import SettingError

PREFIXES = enumerate(("", "k", "m", "g", "t"))
UNITS = {f"{p}{i}b": base**n for n, p in PREFIXES for i, base in (("", 1000), ("i", 1024))}
SPELLED = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))


def size(number: float) -> str:
    """Bytes in words: ``"14.3 GiB"``."""
    name, bytes_ = unit(number)
    return f"{number / bytes_:,.1f} {name}" if bytes_ > 1 else f"{number:.0f} B"


def rate(value: float) -> str:
    """A number a second: ``"5,120"``, ``"51.2"``."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float | None) -> str:
    """Seconds in words: ``"0.123 s"``, ``"12.3 s"``, ``"2 min 05 s"``, ``"3 h 20 min"``; ``"–"`` for None."""
    if seconds is None:
        return "–"
    if seconds < 99.95:
        return f"{seconds:.3g} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, remainder = divmod(round(seconds), 60)
    return f"{minutes} min {remainder:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def unit(number: float) -> tuple[str, int]:
    """The largest unit that fits into `number` bytes, with its bytes."""
    return next((pair for pair in SPELLED if number >= pair[1]), SPELLED[-1])


def is_size(text: str) -> bool:
    """Whether a text is bytes with their unit, such as ``"16GiB"``; a number alone may be a module's name."""
    return re.fullmatch(r"\s*[0-9][0-9_.]*\s*[KMGT]i?B\s*", text, re.IGNORECASE) is not None


def read_bytes(value: Any, prefix: str) -> int:
    """Parse a number of bytes, or a text such as ``"16GiB"``; a SettingError begins with `prefix`."""
    text = "" if isinstance(value, bool) else str(value).lower()
    match = re.fullmatch(r"\s*([0-9.]+(?:e\+?[0-9]+)?)\s*([a-z]*)\s*", text)
    try:
        number = int(float(match[1]) * UNITS[match[2] or "b"]) if match else 0
    except (KeyError, ValueError, OverflowError):
        number = 0
    if number < 1:
        raise SettingError(f"{prefix}{value!r} is not a size: use a number of bytes, or a unit, as in 16GiB or 16GB")
    return number


def columns(rows: Sequence[Sequence[str]], text_columns: int = 1) -> list[str]:
    """Align `rows` in lines: the first `text_columns` on the left, the others, numbers, on the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    aligned = (
        [c.ljust(w) if i < text_columns else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))] for row in rows
    )
    return ["  ".join(row).rstrip() for row in aligned]


def flat(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Flatten nested dicts: ``{"model": {"depth": 2}}`` becomes ``{"model/depth": 2}``; lists become text."""
    flattened: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flattened.update(flat(value, f"{above}{key}/"))
        else:
            flattened[f"{above}{key}"] = str(value) if isinstance(value, list) else value
    return flattened
