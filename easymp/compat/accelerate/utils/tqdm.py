"""``accelerate.utils.tqdm``."""

from __future__ import annotations

from ....logging import tqdm

__all__ = ["tqdm"]
