"""``accelerate.utils.memory``."""

from __future__ import annotations

from ....training.oom import find_executable_batch_size, release_memory
from ....training.oom import out_of_memory as should_reduce_batch_size
from ..layer import layer

__all__ = ["clear_device_cache", "find_executable_batch_size", "release_memory", "should_reduce_batch_size"]
__getattr__ = layer.absent("accelerate.utils.memory", {}, lambda: __all__)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give cached device memory back, and collect garbage in any case."""
    release_memory()
