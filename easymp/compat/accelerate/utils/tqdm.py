"""``accelerate.utils.tqdm``."""

from __future__ import annotations

from ....log import tqdm

__all__ = ["tqdm"]
