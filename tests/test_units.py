"""Bytes in words."""

from __future__ import annotations

from easymp.base.units import size


def test_a_size_in_words() -> None:
    assert [size(n) for n in (0, 12, 2048, 3 << 20, 80 * 2**30)] == [
        "0 B",
        "12 B",
        "2.0 KiB",
        "3.0 MiB",
        "80.0 GiB",
    ]
    assert size(1.5) == "2 B"  # a rate need not be whole
