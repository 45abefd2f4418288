"""Which device a rank of a migrated script trains on, where the script's own calls do not say it."""

from __future__ import annotations

import torch

from ..distributed import Ranks


def device_of(ranks: Ranks) -> torch.device:
    """This rank's GPU, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", ranks.local_rank % torch.cuda.device_count())
    return torch.device("cpu")
