"""``accelerate.utils.random``."""

from __future__ import annotations

from ....base.rng import set_seed
from ..layer import layer

__all__ = ["set_seed"]
ALIKE = "set_seed(seed) seeds all ranks alike; the order of data is the same on them by itself"
INSTEAD = dict.fromkeys(("synchronize_rng_state", "synchronize_rng_states"), ALIKE)
__getattr__ = layer.absent("accelerate.utils.random", INSTEAD, lambda: __all__)
