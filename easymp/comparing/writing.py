"""Numbers as people read them."""

from __future__ import annotations


def seconds(value: float | None) -> str:
    """``"0.123 s"``, ``"12.3 s"``, ``"2 min 05 s"``, ``"3 h 20 min"``."""
    if value is None:
        return "–"
    if value < 99.95:
        return f"{value:.3g} s" if value < 9.995 else f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def ratio(value: float) -> str:
    """``"0.62"``, ``"1.31"``, ``"12"``."""
    return f"{value:.2f}" if value < 9.95 else f"{value:.0f}"


def rate(value: float | None) -> str:
    """``"5,120"``, ``"51.2"``."""
    return "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
