"""Where torch's releases differ in what a test may ask for."""

from __future__ import annotations

from easymp.base.rng import TORCH
from easymp.optim.sharded import SUMS_ARE_RIGHT

ADDS = TORCH >= SUMS_ARE_RIGHT
"""Whether sharded tensors add right to sums of themselves.

Where not, optimizers that may do so are refused for shards.
"""
