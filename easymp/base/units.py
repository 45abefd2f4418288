"""Numbers of bytes in words."""

from __future__ import annotations

UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))


def size(number: float) -> str:
    """Bytes in words: ``"14.3 GiB"``."""
    name, bytes_ = unit(number)
    return f"{number / bytes_:,.1f} {name}" if bytes_ > 1 else f"{number:.0f} B"


def unit(number: float) -> tuple[str, int]:
    """The largest unit of which `number` bytes are at least one, and its bytes."""
    return next((pair for pair in UNITS if number >= pair[1]), UNITS[-1])
