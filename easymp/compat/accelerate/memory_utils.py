"""``accelerate.memory_utils``, where older scripts find it."""

from __future__ import annotations

from .utils.memory import find_executable_batch_size, release_memory

__all__ = ["find_executable_batch_size", "release_memory"]
