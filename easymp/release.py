"""Which torch this is, for the few places where releases differ in what they do right."""

from __future__ import annotations

import torch


def numbers(version: str) -> tuple[int, ...]:
    """``(2, 11)`` of ``"2.11.0+cu130"``, and of ``"2.11.0a0+1234"``, as NVIDIA's containers have it: it counts as what it becomes."""
    return tuple(int(part) for part in version.split(".")[:2])


TORCH = numbers(torch.__version__)
