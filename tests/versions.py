"""Where torch's releases differ in what a test may ask for."""

from __future__ import annotations

from easymp.base.torch_flags import TORCH
from easymp.optim.partition import SUMS_ARE_RIGHT

ADDS = TORCH >= SUMS_ARE_RIGHT
"""Whether sharded tensors add right to sums of themselves. Where not, optimizers that may do so are refused for shards."""


def grace(seconds: int) -> list[str]:
    """For the launcher. torch before 2.13 gives workers 30 seconds, another number is refused there, and tests wait for them."""
    return ["--grace", str(seconds)] if TORCH >= (2, 13) else []
